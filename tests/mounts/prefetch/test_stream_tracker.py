"""The planner's belief of a reader's position, by signs that may be another program's."""

import numpy as np

from diesel_fs.mounts.prefetch.decisions import Push
from diesel_fs.mounts.prefetch.planner import PrefetchPlanner
from tests.rows import each_row

from .simulated_kernel import START_S, make_planner, next_push, stream

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
