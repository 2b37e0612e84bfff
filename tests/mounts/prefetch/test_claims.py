"""`Claims` of a stream: their ends, and the claims that are left."""

from diesel_fs.mounts.prefetch.streams.claims import Claims
from tests.rows import each_row

from .one_stream import claim_next, order_of, tracker_of
from .simulated_kernel import stream

ORDER = list(range(512))  # eight chunks


def claimed(*orders: list[int], units: int, slack: int = 0) -> Claims:
    """The claims of a stream that has claimed its first units."""
    tracker = tracker_of(stream("a", *orders))
    for _ in range(units):
        claim_next(tracker)
    tracker.claims.slack = slack
    return tracker.claims


def test_the_floor_stays_behind_low_until_the_end() -> None:
    claims = claimed(ORDER, units=8, slack=100)
    assert claims.pass_floor(80).tolist() == []
    assert claims.pass_floor(250).tolist() == ORDER[:150]
    assert claims.pass_floor(200).tolist() == [], "it never moves back"
    assert claims.floor == 150
    assert claims.pass_floor(512).tolist() == ORDER[150:]
    assert claims.order.epochs == []


def test_passed_epochs_are_removed_and_empty_ones_with_them() -> None:
    claims = claimed(ORDER[:64], [], [7, 8], units=1)
    assert claims.pass_floor(64).tolist() == ORDER[:64]
    assert [state.base for state in claims.order.epochs] == [64]


def test_entries_that_are_passed_without_a_claim_are_skipped() -> None:
    claims = claimed(ORDER, units=1)
    claims.skipped = []
    assert claims.pass_floor(80).tolist() == ORDER[:64]
    assert [each.tolist() for each in claims.take_skipped()] == [ORDER[64:80]]
    assert claims.take_skipped() == []


def test_given_up_claims_are_cut_and_claimed_again() -> None:
    tracker = tracker_of(stream("a", ORDER, [600, 601]))
    units = [claim_next(tracker) for _ in range(9)]
    assert tracker.order.frontier_index == 1
    assert tracker.claims.retreat(448 + 32).tolist() == [*ORDER[480:], 600, 601]
    assert tracker.order.frontier_index == 0
    assert tracker.order.claimed_end() == 480
    assert tracker.claims.retreat(480).tolist() == []
    assert claim_next(tracker) == units[7][32:]
    assert claim_next(tracker) == units[8]


def test_the_floor_follows_a_reader_that_goes_back() -> None:
    claims = claimed(ORDER, units=8)
    claims.pass_floor(200)
    claims.lower_floor(100)
    assert claims.floor == 100
    assert claims.has_gaps(100, 300)
    assert not claims.has_gaps(200, 300)
    assert claims.has_gaps(99, 99), "below the floor"
    assert claims.entries(190, 20).tolist() == ORDER[200:210]


@each_row(("capacity", "lag", "slack"), [(800, 4_096, 100), (800, 50, 50), (8, 4_096, 1)])
def test_the_slack_fits_the_share(capacity: int, lag: int, slack: int) -> None:
    order = order_of(ORDER)
    order.capacity = capacity
    claims = Claims(order)
    claims.fit_slack(lag)
    assert claims.slack == slack
    claims.widen_slack(1_000)
    assert claims.slack == max(capacity // 3, slack)
    order.capacity = 3
    claims.fit_slack(lag)
    assert claims.slack == 1


def test_claims_across_epochs() -> None:
    claims = claimed([1, 2, 3], [4, 5], units=2)
    assert claims.entries(1, 3).tolist() == [2, 3, 4]
    assert claims.entries(9, 3).tolist() == []
    assert claims.at_frontier().tolist() == [4, 5]


@each_row(("lag", "assumed", "slack"), [(600, 4_096, 600), (0, 4_096, 2_500), (5_000, 512, 2_500)])
def test_the_slack_is_the_lag_that_the_stream_has_announced(
    lag: int, assumed: int, slack: int
) -> None:
    """Otherwise the lag that is assumed, but never more than an eighth of the memory."""
    order = order_of(ORDER, lag=lag)
    order.capacity = 20_000
    claims = Claims(order)
    claims.fit_slack(assumed)
    assert claims.slack == slack


@each_row(("reports", "is_wider"), [(False, True), (True, False)])
def test_late_READs_keep_claims_longer_unless_the_reader_reports(
    reports: bool, is_wider: bool
) -> None:
    """They may be another program's."""
    order = list(range(10_000))
    tracker = tracker_of(stream("a", order, lag=512))
    tracker.reader.note_read(500, 1.0)
    if reports:
        tracker.progress(2_500, 1.0)
    else:
        tracker.reader.move_to(2_500, 1.0)
        tracker.reader.is_reported = False
    tracker.pass_floor()
    slack, lag = tracker.claims.slack, tracker.reader.lag
    assert (slack, tracker.claims.floor) == (512, 2_500 - 512)
    for position in (1_000, 1_010, 1_020, 1_030):
        assert tracker.note_late_read(position, 1.5).tolist() == []
    assert (tracker.claims.slack > slack) == is_wider
    assert (tracker.reader.lag > lag) == is_wider


def test_late_READs_do_not_begin_again_a_reader_that_reports() -> None:
    """However long it has stood still: its program would report that it has gone back."""
    tracker = tracker_of(stream("a", list(range(10_000)), lag=512))
    for _ in range(100):
        claim_next(tracker)
    tracker.progress(5_000, 1.0)
    tracker.pass_floor()
    for position in range(100, 200):
        assert tracker.note_late_read(position, 100.0).tolist() == []
    assert (tracker.reader.low, tracker.reader.high) == (5_000, 5_000)
