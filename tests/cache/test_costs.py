"""`ReadCosts` fits the latency and the transfer of a place to the reads that were observed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.policies.costs import LATENCY_S_MAX, ReadCosts


def observed(*reads: tuple[int, float], times: int = 64, at_once: int = 1) -> ReadCosts:
    costs = ReadCosts()
    for _ in range(times):
        for size, seconds in reads:
            costs.observe(size, seconds, at_once)
    return costs


def test_a_place_with_reads_of_several_sizes() -> None:
    """Latency 20 ms and 50 MB/s for each of four reads that are under way at once."""
    sizes = (100_000, 4_000_000, 800_000, 2_000_000)
    costs = observed(*((size, 0.02 + size / 50e6) for size in sizes), times=16, at_once=4)
    latency_s, transfer_s = costs.cost(8_000_000, 4_000_000)
    assert transfer_s == pytest.approx(8_000_000 / 200e6, rel=0.01)
    assert latency_s + transfer_s == pytest.approx(0.02 + 4_000_000 / 50e6, rel=0.01)
    assert costs.read_s(1_000_000) == pytest.approx(0.04, rel=0.01)
    assert costs.gap_bytes == pytest.approx(1_000_000, rel=0.01)
    assert costs.cost(0, 4_000_000) == (0.0, 0.0)


def test_reads_of_one_size_change_the_larger_part() -> None:
    """Small reads change the latency, large ones the transfer."""
    small = observed((100_000, 0.03))
    assert small.read_s(100_000) == pytest.approx(0.03)
    assert small.s_per_byte == ReadCosts().s_per_byte
    large = observed((4 << 20, 0.5))
    assert large.read_s(4 << 20) == pytest.approx(0.5)
    assert large.latency_s == ReadCosts().latency_s
    assert observed((0, 0.01)).read_s(0) == pytest.approx(0.01)


def test_an_outage_is_no_latency() -> None:
    assert observed((4096, 60.0)).latency_s == LATENCY_S_MAX


def test_a_place_counts_as_slow_until_a_read_shows_otherwise() -> None:
    costs = ReadCosts()
    assert costs.is_slow
    costs.observe(100, 0.0001)
    assert not costs.is_slow
    for _ in range(100):
        costs.observe(100, 1.0)
    assert costs.is_slow
    for _ in range(100):
        costs.observe(100, 0.0001)
    assert not costs.is_slow


Reads = st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e6)), max_size=60)


@given(Reads)
def test_costs_stay_usable_after_any_reads(reads: list[tuple[int, float]]) -> None:
    costs = ReadCosts()
    for size, seconds in reads:
        costs.observe(size, seconds)
    assert 0 <= costs.latency_s <= LATENCY_S_MAX
    assert costs.s_per_byte >= 0
    assert 4 << 10 <= costs.gap_bytes <= 4 << 20
    assert min(costs.cost(1 << 20, 1 << 19)) >= 0
