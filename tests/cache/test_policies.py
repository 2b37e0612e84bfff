"""Laws that every eviction policy obeys, and the rule of each."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.policies.eviction import POLICIES, EvictionPolicy
from diesel_fs.orders.future import FutureUses, UnitOrder

EVERY = pytest.mark.parametrize("name", [*POLICIES])

UNITS = st.integers(0, 8)
SIZES = st.integers(1, 50)
Call = tuple[str, int] | tuple[str, int, int]
"""A method of a policy and its arguments."""
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), UNITS, SIZES),
        st.tuples(st.sampled_from(["remove", "record_access"]), UNITS),
    ),
    max_size=40,
)


def policy_after(name: str, calls: Sequence[Call]) -> EvictionPolicy:
    policy = POLICIES[name]()
    for method, *arguments in calls:
        getattr(policy, method)(*arguments)
    return policy


def sizes_after(calls: Sequence[Call]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for method, unit, *size in calls:
        if method == "insert":
            sizes[unit] = size[0]
        elif method == "remove":
            sizes.pop(unit, None)
    return sizes


@EVERY
@given(calls=CALLS)
def test_a_policy_knows_the_units_in_the_cache(name: str, calls: list[Call]) -> None:
    policy, sizes = policy_after(name, calls), sizes_after(calls)
    assert (dict(policy.sizes), policy.bytes) == (sizes, sum(sizes.values()))
    assert sorted(policy.eviction_order()) == ([] if name == "none" else sorted(sizes))


@EVERY
@given(calls=CALLS, unit=UNITS, size=SIZES, room=st.integers(0, 60))
def test_there_can_be_room_for_every_admitted_unit(
    name: str, calls: list[Call], unit: int, size: int, room: int
) -> None:
    policy = policy_after(name, calls)
    if policy.admits(unit, size, room):
        assert room + sum(policy.sizes[each] for each in policy.eviction_order()) >= size


@EVERY
@given(calls=CALLS)
def test_answers_depend_on_calls_alone_and_change_nothing(name: str, calls: list[Call]) -> None:
    one, other = policy_after(name, calls), policy_after(name, calls)
    first = list(one.eviction_order())
    one.admits(1, 10, 0)
    assert [list(one.eviction_order()), list(other.eviction_order())] == [first, first]


@EVERY
@given(calls=CALLS, after=st.dictionaries(UNITS, st.integers(100, 120)))
def test_renumbered_units_stay_in_order(
    name: str, calls: list[Call], after: dict[int, int]
) -> None:
    after = {old: new for new, old in {new: old for old, new in after.items()}.items()}
    policy, sizes = policy_after(name, calls), sizes_after(calls)
    order = [after[unit] for unit in policy.eviction_order() if unit in after]
    policy.renumber(after)
    assert dict(policy.sizes) == {after[unit]: sizes[unit] for unit in sizes if unit in after}
    assert policy.bytes == sum(policy.sizes.values())
    assert list(policy.eviction_order()) == order


@given(calls=CALLS)
def test_each_policy_evicts_by_its_rule(calls: list[Call]) -> None:
    """LRU evicts the longest unread; LFU the least often read since it came, among equals the
    longest unread; `none` evicts nothing."""
    last: dict[int, int] = {}
    uses: dict[int, int] = {}
    for turn, (method, unit, *_) in enumerate(calls):
        if method == "insert":
            last[unit], uses[unit] = turn, uses.get(unit, 0)
        elif method == "remove":
            last.pop(unit, None)
            uses.pop(unit, None)
        elif unit in last:
            last[unit], uses[unit] = turn, uses[unit] + 1
    by_age = sorted(last, key=lambda unit: last[unit])
    for name, order in (
        ("lru", by_age),
        ("plan", by_age),  # as long as no order is known
        ("lfu", sorted(by_age, key=lambda unit: uses[unit])),
        ("none", []),
    ):
        policy = policy_after(name, calls)
        assert list(policy.eviction_order()) == order
        assert policy.admits(9, 10, 10 - policy.bytes) == (name != "none" or not policy.bytes)


# The policy `plan`: the units that are read again soonest stay


def plan_policy(
    orders: list[list[int]], held: Sequence[int]
) -> tuple[EvictionPolicy, Callable[[int, int], None]]:
    """A policy that knows these orders, and a function that has a rank be at a position."""
    policy, future = POLICIES["plan"](), FutureUses([*map(UnitOrder, map(np.array, orders))], 10)
    for unit in held:
        policy.insert(unit, 1)
    policy.set_future(future)
    return policy, lambda rank, position: policy.note_passed(future.seek(rank, position))


def test_plan_evicts_the_unneeded_first_then_the_farthest_next_use() -> None:
    policy, advance = plan_policy([[1, 2, 3], [3, 4, 1]], [1, 2, 3, 4, 5, 6])
    assert [*policy.eviction_order()] == [5, 6, 2, 4, 1, 3]
    policy.record_access(5)
    assert [*policy.eviction_order()] == [6, 5, 2, 4, 1, 3]
    advance(0, 2)
    advance(1, 1)
    assert [*policy.eviction_order()] == [2, 6, 5, 1, 3, 4]  # 2 was inserted before them
    policy.set_future(None)
    assert [*policy.eviction_order()] == [1, 2, 3, 4, 6, 5]
    policy, advance = plan_policy([[1, 2, 3], [3, 4, 1]], [1, 2, 3, 4, 5, 6, 7])
    values = np.zeros(10, np.float32)
    values[[1, 5, 6]] = 9, 2, 1
    policy.set_values(values)
    for _ in range(2):
        assert [*policy.eviction_order()] == [7, 6, 5, 2, 4, 3, 1]
        policy.record_access(6)
    policy.remove(7)
    policy.insert(8, 1)
    advance(0, 3)
    advance(1, 2)
    assert [*policy.eviction_order()] == [2, 3, 4, 8, 6, 5, 1]  # 1 is read once more
    policy.renumber({unit: 20 + unit for unit in policy.sizes})  # another version has other values
    assert len([*policy.eviction_order()]) == 7


def test_plan_replaces_only_units_that_are_needed_later() -> None:
    policy, advance = plan_policy([[1, 2, 3, 1, 4, 1, 2]], [2, 4])
    assert policy.replaces(1, [4]) is True
    assert policy.replaces(3, [2]) is False  # 2 is read before 3
    assert policy.replaces(5, [4]) is False  # 5 is never read
    assert policy.replaces(1, [4], uses_min=2) is True  # it is read twice before 4
    assert policy.replaces(1, [4], uses_min=3) is False
    advance(0, 7)
    assert policy.replaces(5, [4]) is None  # nothing is known of either
    assert POLICIES["lru"]().replaces(1, [2]) is None


@given(calls=CALLS, orders=st.lists(st.lists(UNITS, max_size=8), max_size=3),
       moves=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8)), max_size=6),
       old_keys=st.sampled_from([0, 1024]))  # fmt: skip
def test_the_order_of_plan_is_that_of_the_next_uses(
    calls: list[Call], orders: list[list[int]], moves: list[tuple[int, int]], old_keys: int
) -> None:
    """This is Belady's MIN; `tests/peers/node/test_planned_cache.py` compares the hits."""
    policy = policy_after("plan", calls)
    future = FutureUses([UnitOrder(np.array(each, np.int64)) for each in orders], 9)
    policy.set_future(future)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diesel_fs.cache.policies.eviction._OLD_KEYS_MIN", old_keys)
        for rank, position in moves:
            if rank < len(orders):
                policy.note_passed(future.seek(rank, position))
        for method, *arguments in calls[::2]:
            getattr(policy, method)(*arguments)
    never, at = 1 << 40, dict.fromkeys(range(len(orders)), 0)
    at |= {rank: min(position, len(orders[rank])) for rank, position in moves if rank in at}
    next_use = {
        unit: min(
            (place for rank, order in enumerate(orders) for place, each in enumerate(order)
             if each == unit and place >= at[rank]), default=never,
        )
        for unit in range(9)
    }  # fmt: skip
    evicted = [*policy.eviction_order()]
    assert [next_use[unit] for unit in evicted] == sorted(
        (next_use[unit] for unit in policy.sizes), reverse=True
    )
    for victim in evicted[:1]:
        for unit in {*range(9)} - {*policy.sizes}:
            needs, is_known = next_use[unit] < next_use[victim], next_use[victim] < never
            is_known |= next_use[unit] < never
            assert policy.replaces(unit, [victim]) is (needs if is_known else None)
