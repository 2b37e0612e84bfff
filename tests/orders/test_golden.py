"""Orders that every later version must give, so that runs begun with an older one can continue.

A second implementation of the description fixes them to the last file, so no test needs to show
that they are random: splitmix64 is.
"""

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.orders.shuffle import chunk_shuffle, full_shuffle
from tests.rows import each_row

from .datasets import dataset

SMALL = dataset(6, 3)
MASK = (1 << 64) - 1


def draw(state: int, word: int) -> int:
    """The generator as `shuffle.py` describes it, on Python integers."""
    z = (state + (word + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def by_the_book(snapshot: Snapshot, seed: int, epoch: int, group_size: int) -> list[int]:
    """The order of a dataset, computed file by file."""
    chunk_state, file_state = (draw(draw(domain, seed), epoch) for domain in (1, 2))

    def chunk_key(number: int) -> int:
        high, low = (
            int.from_bytes(snapshot.chunk_ids[number][at : at + 8], "big") for at in (0, 8)
        )
        return draw(draw(chunk_state, high), low)

    chunks = sorted(range(snapshot.chunk_count), key=chunk_key)
    of_file = dict(zip(snapshot.files().tolist(), snapshot.chunk_of(snapshot.files()), strict=True))
    order = []
    for start in range(0, len(chunks), group_size):
        group = set(chunks[start : start + group_size])
        files = [file for file, chunk in of_file.items() if int(chunk) in group]
        order += sorted(files, key=lambda i: draw(file_state, i))
    return order


def test_the_generator_is_splitmix64() -> None:
    """The outputs are those published with the algorithm."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [draw(1234567, word) for word in range(3)] == published


@each_row("seed", [0, 1, 2**63 - 1])
@each_row("epoch", [0, 5, 2**63 - 1])
@each_row("group_size", [1, 2, 4, 100])
@each_row("snapshot", [SMALL, dataset(40, 25)])
def test_orders_follow_the_description(
    seed: int, epoch: int, group_size: int, snapshot: Snapshot
) -> None:
    order = chunk_shuffle(snapshot, seed, epoch, group_size=group_size)
    assert order.tolist() == by_the_book(snapshot, seed, epoch, group_size)


GOLDEN = {
    (0, 0, 2, 0, 1): [9, 15, 11, 25, 13, 23, 19, 21, 17, 14, 16, 18, 22, 20, 24, 10, 12, 8],
    (1, 2, 2, 0, 1): [17, 11, 19, 21, 13, 15, 18, 16, 8, 12, 14, 10, 22, 20, 23, 25, 24, 9],
    (1, 3, 2, 0, 1): [9, 22, 24, 25, 23, 20, 14, 10, 8, 12, 18, 16, 21, 13, 17, 15, 19, 11],
    (42, 7, 3, 1, 4): [20, 19, 24, 10, 9],
}
"""Orders by seed, epoch, group size, rank and world."""

FULL = [18, 22, 20, 17, 11, 23, 25, 16, 19, 21, 8, 13, 12, 14, 10, 24, 9, 15]


def test_golden_orders() -> None:
    for (seed, epoch, group_size, rank, world), expected in GOLDEN.items():
        order = chunk_shuffle(SMALL, seed, epoch, group_size=group_size, rank=rank, world=world)
        assert order.tolist() == expected
    assert full_shuffle(SMALL, 1, 2).tolist() == FULL
