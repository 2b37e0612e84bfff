"""The planner's belief of a reader's position, by signs that may be another program's."""

import numpy as np

from diesel_fs.mounts.prefetch.decisions import Push
from diesel_fs.mounts.prefetch.planner import PrefetchPlanner
from diesel_fs.mounts.prefetch.streams.stream_tracker import (
    HORIZON_DIVISOR,
    HORIZON_DIVISOR_UNREPORTED,
    HORIZON_ENTRIES_MIN,
    HORIZON_S,
    StreamTracker,
)
from diesel_fs.mounts.prefetch.streams.units_ahead import NextUnit
from tests.rows import each_row

from .one_stream import FILES, tracker_of
from .simulated_kernel import (
    CHUNK_ENTRIES,
    START_S,
    Machine,
    N,
    chunk_wise,
    make_planner,
    next_push,
    pushed_ahead,
    shuffled,
    stream,
)

COUNT = 20_000


def followed(lag: int = 0) -> PrefetchPlanner:
    """A planner with one stream in the order of the entries, and memory for a fifth of them."""
    planner = make_planner(COUNT, 0.2, chunk_entries=1_000)
    planner.streams.announce(stream("a", list(range(COUNT)), lag=lag), START_S)
    return planner


def first_pushed(planner: PrefetchPlanner) -> int:
    # Files that READs have brought do not count as resident any more then.
    return int(next_push(planner, START_S + 2).entries.min())


def high(planner: PrefetchPlanner) -> int:
    return planner.stats()["streams"][0]["high"]


def test_entries_that_the_reader_has_passed_are_not_pushed() -> None:
    planner = followed()
    for entry in range(600):
        planner.missed(entry, 100.1)
    assert first_pushed(planner) == 600


def test_files_that_the_reader_has_passed_before_their_push_are_reported() -> None:
    """Order logs need them: READs have brought them, perhaps READs of other files."""
    planner = followed()
    planner.streams.set_logged(lambda _: False)
    for entry in range(1_400):
        planner.missed(entry, 100.1)
    first = first_pushed(planner)
    skipped = np.concatenate(planner.streams.take_skipped())
    assert np.unique(skipped).tolist() == [*range(first)]
    assert first >= 1_000
    assert planner.streams.take_skipped() == []


def test_signs_that_may_be_of_files_read_ahead_need_to_be_nearer_than_chance() -> None:
    """READs of files anywhere in the order, as the kernel sends them ahead of others: with three
    near each other by chance, the reader has not jumped. With all of them near each other, it
    has."""
    rng = np.random.default_rng(4)
    planner = followed()
    for entry in range(300):
        planner.missed(entry, 100.1, is_sure=False)
    for entry in rng.permutation(np.arange(2_000, COUNT))[:200].tolist():
        planner.missed(entry, 100.2, is_sure=False)
    assert high(planner) == 300
    for entry in range(15_000, 15_080):
        planner.missed(entry, 100.3, is_sure=False)
    assert 15_080 <= high(planner) < 16_000
    surely = followed()
    for entry in rng.permutation(np.arange(2_000, COUNT))[:200].tolist():
        surely.missed(entry, 100.2)
    assert high(surely) > 0, "a reader's own READs are believed sooner"


def test_entries_that_slower_workers_want_are_pushed() -> None:
    """Four workers read batches of 64 files; one is ahead of the others by up to three batches."""
    planner = followed()
    for entry in range(64):
        for worker in (3, 2, 1, 0):
            planner.missed(64 * worker + entry, 100.1)
    planner.missed(10 * 64, 100.2)  # the worker that was first reads on
    high = 10 * 64 + 1
    assert high - 6 * 64 <= first_pushed(planner) <= high - 2 * 64


@each_row(("lag", "first"), [(0, 65), (256, 0)])
def test_entries_that_other_workers_hold_at_the_start_are_pushed(lag: int, first: int) -> None:
    """The stream says how far apart they read. An entry of the second batch is read first; without
    that report the first batch would count as read."""
    planner = followed(lag)
    planner.missed(64, 100.1)
    assert first_pushed(planner) == first


def test_the_spread_of_the_workers_shrinks_again() -> None:
    planner = followed()
    planner.missed(400, 100.1)
    planner.missed(0, 100.1)
    for entry in range(401, 500):
        planner.missed(entry, 100.2)
    assert 450 <= first_pushed(planner) <= 500


def test_a_marker_that_a_READ_brought_counts_as_opened() -> None:
    """It was read before its watch was made; waiting for it would hold the low back."""
    planner = followed()
    for entry in range(2_000):
        planner.missed(entry, 100.1)
    assert planner.stats()["streams"][0]["low"] > 1_700


def test_an_open_of_the_next_epochs_first_file_in_this_epoch_does_not_begin_it() -> None:
    """The file is watched for the next epoch, and opened in this one."""
    planner = make_planner(500, 2, chunk_entries=500)
    first = list(range(500))
    planner.streams.announce(stream("a", first, [490, *reversed(first[:490]), *first[491:]]), 100.0)
    while isinstance(push := planner.next(100.0), Push):
        planner.pushed(push, push.entries, [], 100.0)
    assert planner.watches.is_watched(490)
    planner.streams.progress("a", 480, 100.1)
    planner.opened(490, 100.1)
    assert high(planner) == 491
    assert planner.stats()["streams"][0]["epoch"] == 0
    planner.opened(499, 100.2)  # it has the last marker
    planner.opened(490, 100.2)
    assert planner.stats()["streams"][0]["epoch"] == 1


def test_scattered_signs_do_not_move_the_reader() -> None:
    """Some of them are near each other by chance. A reader that jumps makes most signs."""
    count = 200_000
    planner = make_planner(count, 0.1, chunk_entries=1_000)
    planner.streams.announce(stream("a", list(range(count))), 100.0)
    planner.missed(5, 100.0)
    rng = np.random.default_rng(1)
    for entry in rng.integers(20_000, count, 200).tolist():
        planner.missed(entry, 100.1)
    assert high(planner) <= 6
    for entry in range(150_000, 150_100):
        planner.missed(entry, 100.2)
    assert high(planner) == 150_100


# How far ahead of the reader files that will be read again are dropped for others


def unit_at(tracker: StreamTracker, *positions: int, is_urgent: bool = False) -> NextUnit:
    state = tracker.order.epochs[0]
    places = np.array(positions, np.int32)
    return NextUnit(state, places, state.epoch.entries[places], True, [], is_urgent)


@each_row(
    ("reported", "rate", "share", "horizon"),
    [
        (True, 0.0, FILES, HORIZON_ENTRIES_MIN),
        (True, 6_000.0, FILES, int(6_000 * HORIZON_S)),
        (True, 1e6, FILES, FILES // HORIZON_DIVISOR),
        (True, 0.0, 640, 640 // HORIZON_DIVISOR),
        (False, 0.0, FILES, 2 * HORIZON_ENTRIES_MIN),
        (False, 1e6, FILES, FILES // HORIZON_DIVISOR_UNREPORTED),
        (False, 0.0, 640, 640 // HORIZON_DIVISOR_UNREPORTED),
    ],
)
def test_the_horizon_follows_the_rate_and_fits_the_memory(
    reported: bool, rate: float, share: int, horizon: int
) -> None:
    """A reader that reports its position has the smaller one."""
    tracker = tracker_of(stream("a", list(range(FILES))), share_files=share)
    tracker.reader.move_to(1_000, 1.0)
    tracker.reader.rate, tracker.reader.is_reported = rate, reported
    soon, late = 1_000 + horizon, 1_001 + horizon
    assert tracker.comes_soon(unit_at(tracker, soon))
    assert not tracker.comes_soon(unit_at(tracker, late))
    assert tracker.comes_soon(unit_at(tracker, late, late + 1)), "it counts from its last file"
    assert tracker.comes_soon(unit_at(tracker, late, is_urgent=True))
    assert tracker.comes_soon(unit_at(tracker)), "nothing has to be dropped for an empty unit"


def test_free_memory_is_filled_however_far_the_reader_is() -> None:
    machine = pushed_ahead(0.5, stream("a", shuffled(1), shuffled(2)))
    planner = machine.planner
    assert planner.resident_set.bytes > 0.48 * planner.stats()["dataset_bytes"]
    assert machine.dropped == 0


def test_nothing_that_is_read_again_is_dropped_beyond_the_horizon() -> None:
    """When the reader has passed files, what the next epoch reads soonest stays instead of the
    files that the reader comes to later in this one."""
    first, second = shuffled(1), shuffled(2)
    machine = pushed_ahead(0.5, stream("a", first, second, lag=64))
    planner = machine.planner
    assert planner.waits_for_reader
    for end in range(64, N // 4, 64):
        machine.now_s += 0.01
        planner.streams.progress("a", end, machine.now_s)
        machine.run_until_idle()
    assert planner.waits_for_reader
    assert planner.stats()["waits_for_room"]
    # The passed files that stay are those that the next epoch reads first.
    passed = np.array(second)[np.isin(second, first[: N // 4 - 128])]
    assert planner.resident(passed).mean() > 0.3
    frontier = planner.stats()["streams"][0]["frontier"]
    assert planner.resident(first[N // 4 : frontier]).all()


def test_the_planner_waits_for_no_reader_while_memory_is_free() -> None:
    planner = make_planner(N, 2)
    planner.streams.announce(stream("a", shuffled(1)), START_S)
    machine = Machine(planner, N)
    machine.run_until_idle()
    assert not planner.waits_for_reader
    assert planner.resident(np.arange(N)).all()


def test_the_next_group_of_a_chunk_wise_order_is_pushed_during_the_one_before() -> None:
    """Its chunks are needed at nearly the same time."""
    group = 8
    chunks = list(range(N // CHUNK_ENTRIES))
    orders = [chunk_wise(chunks, group, seed) for seed in (1, 2)]
    machine = pushed_ahead(0.2, stream("a", *orders, lag=64))
    planner = machine.planner
    size = group * CHUNK_ENTRIES
    for end in range(64, N // 2 + 1, 64):
        machine.now_s += 0.01
        planner.streams.progress("a", end, machine.now_s)
        machine.run_until_idle()
    at = N // 2 // size * size
    assert planner.resident(orders[0][at : at + size]).all()


# Reports that are a little old


def test_a_stale_report_gives_no_claims_up() -> None:
    """The workers of the reader have gone on while the report was under way."""
    order = shuffled(1)
    machine = pushed_ahead(0.3, stream("a", order, lag=512))
    planner = machine.planner
    tracker = planner.streams.trackers["a"]
    for entry in order[:3_000]:
        machine.now_s += 0.0002
        machine.open_and_read("a", entry)
    machine.run_until_idle()
    assert tracker.claims.floor > 2_000
    claims, pushed = planner.resident_set.claims.copy(), machine.pushed
    planner.streams.progress("a", 2_561 - 512 - 2_000, machine.now_s)  # 0.4 s old
    assert tracker.reader.high >= 2_561
    assert (planner.resident_set.claims == claims).all()
    machine.run_until_idle()
    assert machine.pushed == pushed


def test_a_reader_that_goes_back_keeps_the_files_ahead() -> None:
    """They are not dropped before other files: the reader comes to them again."""
    order = shuffled(1)
    machine = pushed_ahead(0.3, stream("a", order, lag=512))
    planner = machine.planner
    for end in range(64, 8_001, 64):
        machine.now_s += 0.01
        planner.streams.progress("a", end, machine.now_s)
        machine.run_until_idle()
    ahead = order[8_000:9_000]
    assert planner.resident(ahead).all()
    planner.streams.progress("a", 4_000, machine.now_s)
    victims = planner.resident_set.victims(planner.resident_set.bytes // 2, planner.views)
    assert not np.isin(victims, ahead).any()
    planner.resident_set.victims_dropped(victims)
    machine.cached.difference_update(victims.tolist())
    machine.run_until_idle()
    assert planner.resident(order[4_000:4_100]).all()
    assert planner.resident(ahead).all()
