"""Where a stream's reader is: what is believed of signs that may be another's."""

import numpy as np

from diesel_fs.mounts.prefetch.decisions import Push
from diesel_fs.mounts.prefetch.planner import PrefetchPlanner

from .simulated_kernel import stream

COUNT, SIZE = 20_000, 4_096


def followed() -> PrefetchPlanner:
    """One stream in the order of the entries, with a tenth of the memory."""
    chunk = np.arange(COUNT) // 1_000
    test = PrefetchPlanner(chunk, np.full(COUNT, SIZE), 20, budget_bytes=COUNT * SIZE // 5)
    test.announce(stream("a", list(range(COUNT))), 100.0)
    return test


def first_pushed(test: PrefetchPlanner) -> int:
    push = test.next(102.0)  # what READs have brought by now counts no longer
    assert isinstance(push, Push)
    return int(push.entries.min())


def test_what_one_reader_is_past_is_not_pushed() -> None:
    test = followed()
    for entry in range(600):
        test.missed(entry, 100.1)
    assert first_pushed(test) == 600


def test_what_slower_readers_still_want_is_pushed() -> None:
    """Four workers that take turns, 64 files each: one is ahead by up to three batches."""
    test = followed()
    for entry in range(64):
        for worker in (3, 2, 1, 0):
            test.missed(64 * worker + entry, 100.1)
    test.missed(10 * 64, 100.2)  # who was first is on its way
    high = 10 * 64 + 1
    assert high - 6 * 64 <= first_pushed(test) <= high - 2 * 64


def test_the_spread_of_readers_is_forgotten() -> None:
    test = followed()
    test.missed(400, 100.1)
    test.missed(0, 100.1)
    for entry in range(401, 500):
        test.missed(entry, 100.2)
    assert 450 <= first_pushed(test) <= 500


def test_a_marker_that_was_read_by_request_counts() -> None:
    """It was read before its watch stood; waiting for it would hold the low back."""
    test = followed()
    for entry in range(2_000):
        test.missed(entry, 100.1)
    assert test.stats()["streams"][0]["low"] > 1_700


def test_stray_signs_all_over_the_epoch_move_nobody() -> None:
    """Of many, some are near each other by chance; a reader that has jumped makes most of them."""
    size, count = 4_096, 200_000
    chunk = np.arange(count) // 1_000
    test = PrefetchPlanner(chunk, np.full(count, size), 200, budget_bytes=count * size // 10)
    test.announce(stream("a", list(range(count))), 100.0)
    test.missed(5, 100.0)
    rng = np.random.default_rng(1)
    for entry in rng.integers(20_000, count, 200).tolist():
        test.missed(entry, 100.1)
    assert test.stats()["streams"][0]["high"] <= 6
    for entry in range(150_000, 150_100):
        test.missed(entry, 100.2)
    assert test.stats()["streams"][0]["high"] == 150_100
