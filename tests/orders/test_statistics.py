"""How random orders are. Seeds are fixed, so that the tests are deterministic."""

import math

import numpy as np

from diesel_fs.orders.shuffle import chunk_order, chunk_shuffle, full_shuffle
from tests.rows import each_row

from .datasets import dataset

SNAPSHOT = dataset(20, 10)
EPOCHS = 2000
DECILES = 10


def far_out(observed: "np.typing.NDArray[np.int64]", *, freedom: int) -> float:
    """By how many standard deviations chi-square of counts that should be equal is too large."""
    expected = observed.mean()
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    return (chi_square - freedom) / math.sqrt(2 * freedom)


@each_row("group_size", [1, 3, 20])
@each_row("by_seed", [True, False])
def test_each_file_is_as_likely_at_each_tenth_of_the_order(group_size: int, by_seed: bool) -> None:
    """In 2,000 orders, each file should be 200 times in each tenth."""
    files = SNAPSHOT.files()
    seen = np.zeros((len(SNAPSHOT), DECILES), np.int64)
    tenth = np.arange(len(files)) * DECILES // len(files)
    for number in range(EPOCHS):
        seed, epoch = (number, 5) if by_seed else (5, number)
        order = chunk_shuffle(SNAPSHOT, seed, epoch, group_size=group_size)
        seen[order, tenth] += 1
    counts = seen[files]
    assert counts.sum() == EPOCHS * len(files)
    # Files of a chunk go together, so the whole table has the freedom of chunks at least.
    worst = max(far_out(row, freedom=DECILES - 1) for row in counts)
    assert worst < 6  # of 200 files; 4 to 5 is usual for the largest of so many
    mean = float(np.mean([far_out(row, freedom=DECILES - 1) for row in counts]))
    assert abs(mean) < 0.75


def test_each_chunk_is_as_likely_beside_each_other() -> None:
    """Counts which two chunks share a group of two."""
    together = np.zeros((20, 20), np.int64)
    for epoch in range(EPOCHS):
        order = chunk_order(SNAPSHOT, 9, epoch, group_size=2)
        for files in np.split(order.indices, order.ends)[:-1]:
            one, other = sorted(set(SNAPSHOT.chunk_of(files).tolist()))
            together[one, other] += 1
    pairs = together[np.triu_indices(20, 1)]
    assert pairs.sum() == EPOCHS * 10
    assert abs(far_out(pairs, freedom=len(pairs) - 1)) < 4


def test_the_files_of_a_group_are_well_mixed() -> None:
    """Which file of a pair comes first, in and across chunks, is as random as a coin."""
    files = SNAPSHOT.files()
    ahead = np.zeros(len(SNAPSHOT), np.int64)
    for epoch in range(EPOCHS):
        place = np.empty(len(SNAPSHOT), np.int64)
        place[full_shuffle(SNAPSHOT, 3, epoch)] = np.arange(len(files))
        ahead[files] += place[files] < place[np.roll(files, 1)]
    deviations = (ahead[files] - EPOCHS / 2) / math.sqrt(EPOCHS / 4)
    assert float(np.abs(deviations).max()) < 4.5
    assert 0.8 < float(deviations.std()) < 1.2


def test_epochs_of_one_seed_and_seeds_of_one_epoch_are_unrelated() -> None:
    files = len(SNAPSHOT.files())
    orders = [full_shuffle(SNAPSHOT, seed, epoch) for seed in range(12) for epoch in range(12)]
    places = np.argsort(orders).astype(np.float64)
    places -= places.mean(axis=1, keepdims=True)
    rho = places @ places.T / (places[0] @ places[0])
    others = rho[np.triu_indices(len(orders), 1)]
    assert float(np.abs(others).max()) < 5 / math.sqrt(files)
    assert abs(float(others.std()) * math.sqrt(files) - 1) < 0.05
