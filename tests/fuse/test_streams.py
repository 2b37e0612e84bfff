"""Where a stream's reader is: what is believed of signs that may be another's."""

import numpy as np

from diesel_fs.fuse.residency import Residency

from .simulated_kernel import stream


def test_stray_signs_all_over_the_epoch_move_nobody() -> None:
    """Of many, some are near each other by chance; a reader that has jumped makes most of them."""
    size, count = 4_096, 200_000
    chunk = np.arange(count) // 1_000
    test = Residency(chunk, np.full(count, size), 200, budget_bytes=count * size // 10)
    test.announce(stream("a", list(range(count))), 100.0)
    test.missed(5, 100.0)
    rng = np.random.default_rng(1)
    for entry in rng.integers(20_000, count, 200).tolist():
        test.missed(entry, 100.1)
    assert test.stats()["streams"][0]["high"] <= 6
    for entry in range(150_000, 150_100):
        test.missed(entry, 100.2)
    assert test.stats()["streams"][0]["high"] == 150_100
