"""`FarthestUses`: the entries that readers come to last, from the ends of their orders."""

import numpy as np

from diesel_fs.mounts.prefetch.streams.farthest_uses import PIECE_POSITIONS, FarthestUses
from diesel_fs.mounts.prefetch.streams.stream_tracker import StreamTracker
from diesel_fs.orders.plan import Epoch

from .one_stream import FILES, tracker_of
from .simulated_kernel import shuffled, stream

ORDER = shuffled(1, FILES)
P = PIECE_POSITIONS


def search(*trackers: StreamTracker) -> FarthestUses:
    return FarthestUses({str(number): tracker for number, tracker in enumerate(trackers)})


def offered(farthest: FarthestUses) -> list[int]:
    """All that the search still offers. Its edge falls with each piece, and ends at 0."""
    found: list[int] = []
    edge = farthest.edge()
    while (piece := farthest.next()) is not None:
        found += piece.tolist()
        assert farthest.edge() < edge
        edge = farthest.edge()
    assert edge == 0
    return found


def test_the_entries_ahead_are_offered_the_farthest_first() -> None:
    """Those that the reader has passed are left out."""
    tracker = tracker_of(stream("a", ORDER))
    farthest = search(tracker)
    assert farthest.edge() == FILES
    first = farthest.next()
    assert first is not None
    assert first.tolist() == ORDER[: FILES - P - 1 : -1]
    assert farthest.edge() == FILES - P
    tracker.reader.move_to(1_000, 1.0)
    assert farthest.edge() == FILES - P - 1_000
    assert offered(farthest) == ORDER[1_000 : FILES - P][::-1]
    assert farthest.next() is None


def test_the_next_epoch_is_offered_before_the_current_one() -> None:
    """A piece has entries of one epoch only. Later epochs are not looked at."""
    first, second = ORDER[:5_000], ORDER[2_000:8_000]
    tracker = tracker_of(stream("a", first, second, [7]))
    assert offered(search(tracker)) == [*second[::-1], *first[::-1]]
    tracker.reader.move_to(5_100, 1.0)  # in the second epoch; the first has not been removed
    assert offered(search(tracker)) == second[100:][::-1]
    tracker.order.frontier_index = 1
    assert offered(search(tracker)) == [7, *second[100:][::-1]]


def test_the_search_ends_although_the_reader_is_in_the_epoch_before() -> None:
    """All files of that epoch are claimed, so it is not looked at."""
    first, second = ORDER[:5_000], ORDER[2_000:8_000]
    tracker = tracker_of(stream("a", first, second))
    tracker.order.frontier_index = 1
    assert offered(search(tracker)) == second[::-1]


def test_a_reader_that_passes_the_search_ends_it() -> None:
    tracker = tracker_of(stream("a", ORDER))
    farthest = search(tracker)
    farthest.next()
    tracker.reader.move_to(FILES - 10, 1.0)
    assert farthest.edge() == 0
    assert farthest.next() is None


def test_other_epochs_begin_the_search_again() -> None:
    tracker = tracker_of(stream("a", ORDER))
    farthest = search(tracker)
    farthest.next()
    farthest.next()
    tracker.order.extend(tracker.order.stream.extended([Epoch(1, np.array([3, 4]))]))
    assert farthest.edge() == FILES + 2
    assert offered(farthest) == [4, 3, *ORDER[::-1]]
    farthest.restart()
    assert offered(farthest) == [4, 3, *ORDER[::-1]]
    changed = tracker.order.stream.replaced(Epoch(1, np.array([5])), 1)
    tracker.order.replace(tracker.order.epochs[1], changed, 1)
    assert farthest.edge() == FILES + 2
    assert offered(farthest) == [5, 3, *ORDER[::-1]]


def test_an_epoch_that_was_read_ends_and_the_next_one_is_looked_at() -> None:
    tracker = tracker_of(stream("a", [1, 2], [3, 4], [5, 6]))
    farthest = search(tracker)
    assert offered(farthest) == [4, 3, 2, 1]
    tracker.reader.move_to(2, 1.0)
    tracker.order.frontier_index = 1
    tracker.order.remove_first()
    assert offered(farthest) == [6, 5, 4, 3]


def test_the_stream_that_is_farther_ahead_of_its_reader_comes_next() -> None:
    """One reader has the whole order before it, the other one the last half of its own."""
    orders = [ORDER, ORDER[::-1]]
    one, other = (tracker_of(stream("a", order)) for order in orders)
    highs = [0, FILES // 2]
    other.reader.move_to(highs[1], 1.0)
    farthest = search(one, other)
    ahead = [FILES - high for high in highs]
    while max(ahead) > 0:
        assert farthest.edge() == max(ahead)
        turn = ahead.index(max(ahead))
        piece = farthest.next()
        assert piece is not None
        end = highs[turn] + ahead[turn]
        assert piece.tolist() == orders[turn][max(end - P, highs[turn]) : end][::-1]
        ahead[turn] = max(ahead[turn] - P, 0)
    assert farthest.next() is None


def test_nothing_is_offered_without_streams_or_epochs() -> None:
    assert search().next() is None
    assert search().edge() == 0
    assert search(tracker_of(stream("a"))).next() is None
