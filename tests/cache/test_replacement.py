"""`Shortage` chooses the first units of an order that make room together, and no more."""

from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.policies.replacement import Shortage

SIZES = st.lists(st.integers(0, 5), max_size=8)


@given(SIZES, st.integers(-3, 20), st.integers(-3, 6), st.sets(st.integers(0, 7)), st.data())
def test_the_shortest_beginning_of_an_order_leaves(
    sizes: list[int], missing: int, excess: int, stays: set[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    shortage = Shortage[int](missing, excess)
    is_met = shortage.choose(order, sizes.__getitem__, stays.__contains__)
    free = [unit for unit in order if unit not in stays]
    enough = [
        count
        for count in range(len(free) + 1)
        if sum(sizes[unit] for unit in free[:count]) >= missing and count >= excess
    ]
    assert is_met == bool(enough)
    assert shortage.victims == free[: enough[0] if enough else len(free)]
    assert shortage.bytes == missing - sum(sizes[unit] for unit in shortage.victims)


@given(SIZES, SIZES, st.integers(0, 30))
def test_a_second_order_adds_to_the_first(
    first: list[int], second: list[int], missing: int
) -> None:
    sizes = [*first, *second]
    shortage = Shortage[int](missing)
    shortage.choose(range(len(first)), sizes.__getitem__)
    shortage.choose(range(len(sizes)), sizes.__getitem__)
    alone = Shortage[int](missing)
    alone.choose(range(len(sizes)), sizes.__getitem__)
    assert shortage == alone
