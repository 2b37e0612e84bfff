"""Laws that every eviction policy obeys, and the rule of each."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.policy import POLICIES, EvictionPolicy

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
    """The sizes of the units that these calls leave in the cache."""
    sizes: dict[int, int] = {}
    for method, unit, *size in calls:
        if method == "insert":
            sizes[unit] = size[0]
        elif method == "remove":
            sizes.pop(unit, None)
    return sizes


@EVERY
@given(calls=CALLS)
def test_a_policy_knows_what_is_in_the_cache(name: str, calls: list[Call]) -> None:
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
def test_renumbered_units_keep_their_order(
    name: str, calls: list[Call], after: dict[int, int]
) -> None:
    after = {old: new for new, old in {new: old for old, new in after.items()}.items()}
    policy, sizes = policy_after(name, calls), sizes_after(calls)
    order = [after[unit] for unit in policy.eviction_order() if unit in after]
    policy.renumber(after)
    assert dict(policy.sizes) == {after[unit]: sizes[unit] for unit in sizes if unit in after}
    assert policy.bytes == sum(policy.sizes.values())
    assert list(policy.eviction_order()) == order


FULL: list[Call] = [("insert", unit, 10) for unit in range(4)]


def test_lru_evicts_the_longest_unread_first() -> None:
    policy = policy_after("lru", [*FULL, *[("record_access", unit) for unit in (0, 2, 99)]])
    assert list(policy.eviction_order()) == [1, 3, 0, 2]


def test_lfu_evicts_the_least_often_read_first() -> None:
    policy = policy_after("lfu", [*FULL, *[("record_access", unit) for unit in (0, 0, 1, 2, 1)]])
    assert list(policy.eviction_order()) == [3, 2, 0, 1]
    policy.remove(0)
    policy.insert(0, 10)  # its accesses are counted anew
    assert list(policy.eviction_order()) == [3, 0, 2, 1]


def test_none_never_evicts() -> None:
    policy = policy_after("none", FULL)
    assert list(policy.eviction_order()) == []
    assert policy.admits(9, 10, 10)
    assert not policy.admits(9, 10, 9)


def hits(name: str, epochs: int, units: int, capacity: int, seed: int = 0) -> float:
    """The hit rate of a cache of `capacity` units in the last of some epochs in random order."""
    policy, found = POLICIES[name](), 0
    for epoch in range(epochs):
        found = 0
        for unit in np.random.default_rng([seed, epoch]).permutation(units).tolist():
            policy.record_access(unit)
            if unit in policy.sizes:
                found += 1
            elif policy.admits(unit, 1, capacity - policy.bytes):
                if policy.bytes == capacity:
                    policy.remove(next(policy.eviction_order()))
                policy.insert(unit, 1)
    return found / units


def test_hit_rates_in_random_order_match_the_theory() -> None:
    """Half of the units fit. Without eviction, these hit each time: the rate is a half. LRU hits
    where fewer than half of the units were read between two reads of a unit; the places of a unit
    in two epochs are uniform."""
    units, capacity = 4_000, 2_000
    assert hits("none", 3, units, capacity) == 0.5
    x = np.random.default_rng(1)
    first, second = x.random(200_000), x.random(200_000)
    # Those behind it in the first epoch, and of those before it in the second the others
    distinct = (1 - first) + second * first
    assert hits("lru", 3, units, capacity) == pytest.approx(np.mean(distinct < 0.5), abs=0.03)
