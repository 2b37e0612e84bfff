"""The arithmetic of LRFU against the literal sum of DLCache, section III-C.2, in exact
decimals."""

import math
from decimal import Decimal, localcontext
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.disk.rule import LRFU_P, LRFU_STEP
from diesel_fs.cache.policies.lrfu import HOUR_S, Attenuation, Values, eviction_order, hour_of
from tests.rows import each_row

PS = st.sampled_from([1.0001, 1.5, 2.0, 10.0, 1e300])
STEPS = st.sampled_from([0.0, 1e-6, 1 / 24, 0.5, 1.0])
GAPS = st.lists(st.integers(0, 5) | st.sampled_from([100, 10_000, 10**8]), min_size=1, max_size=8)
TIMES = GAPS.map(lambda gaps: [*accumulate(gaps)])


def row(*values: float) -> Values:
    return np.array(values, np.float64)


def kept(rule: Attenuation, times: list[int]) -> tuple[float, float]:
    """Return the value of a block that is referenced at these times, and the time of that value."""
    crf, last = row(0.0), row(0.0)
    for time in times:
        crf, last = rule.add_reference(crf, last, time), row(time)
    return float(crf[0]), float(last[0])


def literal(p: float, step: float, times: list[int], now: int) -> Decimal:
    """The sum of the paper. Decimals have exponents for any gap of these tests."""
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = 60, -(10**15), 10**15
        return sum(
            ((1 / Decimal(p)) ** (Decimal(step) * (now - time)) for time in times), Decimal(0)
        )


@given(p=PS, step=STEPS, times=TIMES, after=st.integers(0, 10**8))
def test_the_kept_value_is_the_sum_of_the_paper(
    p: float, step: float, times: list[int], after: int
) -> None:
    rule, now = Attenuation(p, step), times[-1] + after
    crf, last = kept(rule, times)
    assert crf >= 1
    found = float(rule.log_crf(row(crf), row(last), now)[0])
    with localcontext() as context:
        context.prec = 60
        expected = float(literal(p, step, times, now).ln())
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(p=PS, step=STEPS, times=st.tuples(TIMES, TIMES))
def test_blocks_are_ordered_as_by_the_sum(
    p: float, step: float, times: tuple[list[int], list[int]]
) -> None:
    """This holds even if all sums are too small for a float. Without attenuation (the step 0) the
    number of references counts, and with the step 1 and the base 2 the last one."""
    rule = Attenuation(p, step)
    now = max(each[-1] for each in times) + 10**9
    crf, last = (row(*each) for each in zip(*(kept(rule, each) for each in times), strict=True))
    logs = rule.log_crf(crf, last, now)
    assert np.isfinite(logs).all()
    first, second = (literal(p, step, each, now) for each in times)
    if times[0] == times[1]:
        assert logs[0] == logs[1]
    elif abs(first - second) > max(first, second) * Decimal("1e-6"):
        assert (logs[0] < logs[1]) == (first < second)


def test_a_clock_that_was_set_back_does_not_keep_a_block_for_ever() -> None:
    rule = Attenuation(LRFU_P, LRFU_STEP)
    assert rule.log_crf(row(1.0), row(500.0), 100)[0] == rule.log_crf(row(1.0), row(100.0), 500)[0]
    assert 1 <= rule.add_reference(row(3.0), row(500.0), 100)[0] <= 4


@each_row(
    ("p", "step"), [(0.9, 0.5), (-2.0, 0.5), (math.inf, 0.5), (math.nan, 0.5), (2, -0.1), (2, 1.1)]
)
def test_values_without_a_meaning_are_refused(p: float, step: float) -> None:
    with pytest.raises(ValueError, match="not"):
        Attenuation(p, step)


@given(
    blocks=st.lists(
        st.tuples(*[st.sampled_from([-1e300, -2.5, 0.0, 1.0, 7.0])] * 2), min_size=1, max_size=12
    )
)
def test_the_least_value_goes_first_then_the_longest_unread(
    blocks: list[tuple[float, float]],
) -> None:
    log_crf, used = (row(*each) for each in zip(*blocks, strict=True))
    order = eviction_order(log_crf, used).tolist()
    assert sorted(order) == [*range(len(blocks))]
    assert [blocks[number] for number in order] == sorted(blocks)


def test_times_are_whole_hours() -> None:
    assert hour_of(0) == 0
    assert hour_of(2 * HOUR_S - 0.001) == 1
    assert hour_of(2 * HOUR_S) == 2
    assert hour_of(-1) == -1
