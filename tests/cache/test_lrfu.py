"""The arithmetic of cost-aware LRFU against the literal sum of DLCache, section III-C.2, in exact
decimals."""

import math
from decimal import Decimal, localcontext
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.lrfu import HOUR_S, Attenuation, Values, eviction_order, hour_of
from tests.rows import each_row

PS = st.sampled_from([1.0001, 1.5, 2.0, 10.0, 1e300])
STEPS = st.sampled_from([0.0, 1e-6, 1 / 24, 0.5, 1.0])
GAPS = st.lists(st.integers(0, 5) | st.sampled_from([100, 10_000, 10**8]), min_size=1, max_size=8)


def times_of(gaps: list[int]) -> list[int]:
    """When references come, by the gaps between them."""
    return [*accumulate(gaps)]


def row(*values: float) -> Values:
    return np.array(values, np.float64)


def kept(rule: Attenuation, times: list[int]) -> tuple[float, float]:
    """What is kept of a block that is referenced at these times: a value, and its time."""
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


@given(p=PS, step=STEPS, gaps=GAPS, after=st.integers(0, 10**8))
def test_the_kept_value_is_the_sum_of_the_paper(
    p: float, step: float, gaps: list[int], after: int
) -> None:
    times, rule = times_of(gaps), Attenuation(p, step)
    now = times[-1] + after
    crf, last = kept(rule, times)
    assert crf >= 1
    found = float(rule.log_crf(row(crf), row(last), now)[0])
    with localcontext() as context:
        context.prec = 60
        expected = float(literal(p, step, times, now).ln())
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(p=PS, step=STEPS, one=GAPS, other=GAPS)
def test_blocks_are_ordered_as_by_the_sum(
    p: float, step: float, one: list[int], other: list[int]
) -> None:
    """Also where all sums are too small for a float."""
    rule = Attenuation(p, step)
    times = [times_of(one), times_of(other)]
    now = max(each[-1] for each in times) + 10**9
    crf, last = (row(*each) for each in zip(*(kept(rule, each) for each in times), strict=True))
    logs = rule.log_crf(crf, last, now)
    assert np.isfinite(logs).all()
    first, second = (literal(p, step, each, now) for each in times)
    if times[0] == times[1]:
        assert logs[0] == logs[1]
    elif abs(first - second) > max(first, second) * Decimal("1e-6"):
        assert (logs[0] < logs[1]) == (first < second)


@given(gaps=GAPS)
def test_without_attenuation_it_is_the_number_of_references(gaps: list[int]) -> None:
    rule = Attenuation(2.0, 0.0)
    assert kept(rule, times_of(gaps))[0] == len(gaps)


@given(ages=st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True), data=st.data())
def test_with_step_1_it_is_the_order_of_the_last_references(
    ages: list[int], data: st.DataObject
) -> None:
    """At most one reference in each unit of time."""
    rule, now = Attenuation(2.0, 1.0), 2000
    values = []
    for age in ages:
        before = data.draw(st.sets(st.integers(age + 1, 1500), max_size=20))
        values.append(kept(rule, sorted(now - each for each in {age, *before})))
    crf, last = (row(*each) for each in zip(*values, strict=True))
    logs = rule.log_crf(crf, last, now).tolist()
    by_age = [log for _, log in sorted(zip(ages, logs, strict=True))]
    assert all(younger >= older for younger, older in pairwise(by_age))


def test_a_clock_that_was_set_back_does_not_keep_a_block_for_ever() -> None:
    rule = Attenuation()
    assert rule.log_crf(row(1.0), row(500.0), 100)[0] == rule.log_crf(row(1.0), row(100.0), 500)[0]
    assert 1 <= rule.add_reference(row(3.0), row(500.0), 100)[0] <= 4


@each_row(
    ("p", "step"), [(1.0, 0.5), (0.5, 0.5), (math.inf, 0.5), (math.nan, 0.5), (2, -0.1), (2, 1.1)]
)
def test_values_without_a_meaning_are_refused(p: float, step: float) -> None:
    with pytest.raises(ValueError, match="not"):
        Attenuation(p, step)


@given(
    blocks=st.lists(
        st.tuples(*[st.sampled_from([-1e300, -2.5, 0.0, 1.0, 7.0])] * 3), min_size=1, max_size=12
    )
)
def test_the_least_value_goes_first_then_the_least_cost_then_the_longest_unread(
    blocks: list[tuple[float, float, float]],
) -> None:
    log_crf, cost, used = (row(*each) for each in zip(*blocks, strict=True))
    order = eviction_order(log_crf, cost, used).tolist()
    assert sorted(order) == [*range(len(blocks))]
    assert [blocks[number] for number in order] == sorted(blocks)


def test_times_are_whole_hours() -> None:
    assert hour_of(0) == 0
    assert hour_of(2 * HOUR_S - 0.001) == 1
    assert hour_of(2 * HOUR_S) == 2
    assert hour_of(-1) == -1
