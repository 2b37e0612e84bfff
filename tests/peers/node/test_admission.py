"""Admission and eviction together: hit rates as theory predicts, and never much more cost than
without a cache."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import trio

from diesel_fs.cache.policies.admission import OVERHEAD_FRACTION, SkiRentalAdmission
from diesel_fs.cache.policies.eviction import POLICIES
from tests.rows import each_row

from ..node_caches import ChunkSource, make_cache, running
from ..planned_reads import CHUNK_BYTES, costs

EVERY = pytest.mark.parametrize("policy", [*POLICIES])

Order = Iterator[int]


class Simulated:
    """A cache of chunks of equal size, of which only some fit; each has some files."""

    def __init__(self, policy: str, chunks: int, room: int, files: int) -> None:
        self.source = ChunkSource(range(chunks), CHUNK_BYTES)
        self.source.contents = [self.source.contents[0]] * chunks
        self.size = len(self.source.contents[0])
        self.cache = make_cache(self.source, room * self.size, policy=policy, costs=costs())
        self.files = files
        self.hits = self.reads = 0
        self.spent_s = self.without_s = 0.0

    def run(self, order: Order) -> None:
        """Read files in this order; file i is in chunk i // files."""
        trio.run(self._read, order)

    async def _read(self, order: Order) -> None:
        cost = costs().read_s
        size = self.size // self.files
        async with running(self.cache):
            for file in order:
                number, before = file // self.files, self.source.fetches.total()
                found = await self.cache.read(number, [(0, size)], load=True)
                fetches = self.source.fetches.total() - before
                self.reads += 1
                self.hits += found is not None and not fetches
                self.spent_s += fetches * cost(self.size) + (found is None) * cost(size)
                self.without_s += cost(size)


pytestmark = pytest.mark.usefixtures("quick")


def uniform(files: int, reads: int) -> Order:
    yield from np.random.default_rng(1).integers(0, files, reads).tolist()


def epochs(files: int, count: int) -> Order:
    for epoch in range(count):
        yield from np.random.default_rng([2, epoch]).permutation(files).tolist()


def in_a_circle(files: int, count: int) -> Order:
    for _ in range(count):
        yield from range(files)


def weighted(weights: npt.NDArray[np.float64], reads: int) -> Order:
    yield from np.random.default_rng(3).choice(len(weights), reads, p=weights).tolist()


@EVERY
@each_row("fits", [0.25, 0.5, 0.8])
def test_uniform_reads_hit_as_much_as_fits(policy: str, fits: float) -> None:
    chunks = 200
    found = Simulated(policy, chunks, int(chunks * fits), 8)
    found.run(uniform(chunks * 8, 20_000))
    assert found.hits / found.reads == pytest.approx(fits, abs=0.03)


def test_lfu_keeps_the_chunks_that_are_read_most() -> None:
    """By Zipf's law, the tenth of the files that fits gets more than half of the reads."""
    chunks, room = 300, 30
    weights = 1 / np.arange(1, chunks + 1)
    weights /= weights.sum()
    np.random.default_rng(0).shuffle(weights)
    best = np.sort(weights)[-room:].sum()
    hits = {}
    for policy in POLICIES:
        found = Simulated(policy, chunks, room, 8)
        found.run(iter([chunk * 8 for chunk in weighted(weights, 20_000)]))
        hits[policy] = found.hits / found.reads
    assert 0.9 * best < hits["lfu"] <= best + 0.02
    assert hits["none"] + 0.05 < hits["lfu"]


@EVERY
def test_random_epochs_that_half_fit_cost_little_more_than_half(policy: str) -> None:
    chunks, files = 100, 16
    found = Simulated(policy, chunks, chunks // 2, files)
    found.run(epochs(chunks * files, 4))
    assert 0.42 <= found.hits / found.reads <= 0.51
    assert found.spent_s < 0.65 * found.without_s


@EVERY
@each_row("files", [1, 2, 3, 4, 8, 64])
@each_row("order", [epochs, in_a_circle])
def test_a_dataset_slightly_larger_than_the_cache_never_costs_more_than_no_cache(
    policy: str, files: int, order: Callable[[int, int], Order]
) -> None:
    """LRU has no hits with files of half a chunk that are read in a circle."""
    chunks = 60
    found = Simulated(policy, chunks, chunks * 5 // 6, files)
    found.run(order(chunks * files, 12))
    if order is epochs or policy == "none":
        assert found.spent_s < 0.5 * found.without_s
    else:
        assert found.spent_s <= (1 + OVERHEAD_FRACTION) * found.without_s


def test_any_reads_cost_little_more_than_no_cache() -> None:
    chance = np.random.default_rng(4)
    for _ in range(50):
        request_s, byte_s = chance.uniform(0, 2), chance.uniform(0.01, 1)

        def cost(size: int, request_s: float = request_s, byte_s: float = byte_s) -> float:
            return request_s + size * byte_s

        units, size = 20, 100
        rent = SkiRentalAdmission([size] * units, cost, 10 * size)
        here, spent_s, without_s = set(range(10)), 0.0, 0.0
        for _ in range(5000):
            unit, wanted = int(chance.zipf(1.3)) % units, int(chance.integers(1, size + 1))
            without_s += cost(wanted)
            if unit in here:
                rent.record_hits([unit], wanted)
                continue
            rent.record_miss(unit, wanted)
            if rent.has_credit(unit, wanted):
                rent.charge(unit, wanted)
                here.discard(sorted(here)[0])  # the worst choice
                here.add(unit)
                rent.reset_misses(unit)
                spent_s += cost(size)
            else:
                rent.record_unserved(wanted)
                spent_s += cost(wanted)
            assert spent_s <= (1 + OVERHEAD_FRACTION) * without_s + 1e-6


def test_reads_of_evicted_chunks_cost_little_more_than_no_cache() -> None:
    """The worst case: no chunk is read after its fetch, and half of the evicted ones are wanted."""
    rent, spent_s, without_s = SkiRentalAdmission([100] * 20, float, 1000), 0.0, 0.0
    for read in range(4000):
        unit = read // 2 % 20
        without_s += 51
        rent.record_miss(unit, 51)
        if rent.has_credit(unit, 51):
            rent.charge(unit, 51)
            spent_s += 100
        else:
            rent.record_unserved(51)
            spent_s += 51
        assert spent_s <= (1 + OVERHEAD_FRACTION) * without_s
    assert spent_s > without_s, "but it goes on trying"


def test_the_cache_follows_reads_that_move_to_other_data() -> None:
    chunks, files = 60, 16
    found = Simulated("lru", 2 * chunks, chunks, files)

    def order() -> Order:
        yield from epochs(chunks * files, 3)
        for file in epochs(chunks * files, 4):
            before.append(found.hits)
            yield chunks * files + file

    before: list[int] = []
    found.run(order())
    assert found.hits - before[-chunks * files] > 0.95 * chunks * files, "the new half is here"
