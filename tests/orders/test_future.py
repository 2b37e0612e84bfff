"""Future reads, as columns, against a plain list of uses."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import UsageError
from diesel_fs.orders.future import NEVER, FutureUses, UnitOrder

UNITS = 6

ORDERS = st.lists(
    st.tuples(st.lists(st.integers(0, UNITS - 1), max_size=12), st.integers(0, 9)), max_size=4
)
"""For each rank: its units, and the time of its start."""

SEEKS = st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 14)), max_size=12)


@dataclass
class ListedUses:
    """The oracle: a list of all uses, searched from its start each time."""

    orders: list[tuple[list[int], int]]
    position: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.position = [0] * len(self.orders)

    def left(self, unit: int) -> list[tuple[int, int, int]]:
        """Return time, rank and position of the remaining uses."""
        return sorted(
            (start + position, rank, position)
            for rank, (units, start) in enumerate(self.orders)
            for position, each in enumerate(units)
            if each == unit and position >= self.position[rank]
        )


def check(uses: FutureUses, listed: ListedUses) -> None:
    everything = np.arange(UNITS)
    left = [listed.left(unit) for unit in range(UNITS)]
    assert uses.next_time(everything).tolist() == [each[0][0] if each else NEVER for each in left]
    assert uses.uses_left(everything).tolist() == [*map(len, left)]
    for unit in range(UNITS):
        assert uses.next_time_of(unit) == (left[unit][0][0] if left[unit] else NEVER)
        assert uses.uses(unit) == [(rank, position) for _, rank, position in left[unit]]
        for number in (1, 2, 5):
            times = [at for at, _, _ in left[unit]]
            expected = times[number - 1] if len(times) >= number else NEVER
            assert uses.time_of_use(unit, number) == expected
        for time in (-1, 0, 3, 8, 30, NEVER):
            expected = sum(at < time for at, _, _ in left[unit])
            assert uses.uses_before(unit, time) == expected
    times = [
        start + listed.position[rank]
        for rank, (units, start) in enumerate(listed.orders)
        if listed.position[rank] < len(units)
    ]
    assert uses.now == min(times, default=NEVER)


@given(orders=ORDERS, seeks=SEEKS)
def test_uses_equal_those_of_a_list(orders: list[tuple[list[int], int]], seeks: object) -> None:
    """Readers advance and go back, one by one, also beyond their ends."""
    uses = FutureUses([UnitOrder(np.array(u, np.int64), s) for u, s in orders], UNITS)
    listed = ListedUses(orders)
    check(uses, listed)
    assert isinstance(seeks, list)
    for rank, position in seeks:
        if rank >= len(orders):
            continue
        units = orders[rank][0]
        before, after = listed.position[rank], min(max(position, 0), len(units))
        passed = units[min(before, after) : max(before, after)]
        assert uses.seek(rank, position).tolist() == passed
        listed.position[rank] = after
        assert uses.position(rank) == after
        check(uses, listed)


def test_bad_orders() -> None:
    for units in ([6], [-1]):
        with pytest.raises(UsageError, match="rank 0 names a unit that is not one"):
            FutureUses([UnitOrder(np.array(units))], UNITS)
    with pytest.raises(UsageError, match="before the time 0"):
        FutureUses([UnitOrder(np.array([1]), -1)], UNITS)
    with pytest.raises(UsageError, match="more than 63 bits"):
        FutureUses([UnitOrder(np.array([1]), 1 << 61)], UNITS)
