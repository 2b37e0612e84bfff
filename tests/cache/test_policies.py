"""Laws that every eviction policy obeys, and the rule of each."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.policy import (
    POLICIES,
    Accessed,
    Event,
    Evicted,
    EvictionPolicy,
    Inserted,
)

EVERY = pytest.mark.parametrize("name", [*POLICIES])

UNITS = st.integers(0, 8)
SIZES = st.integers(1, 50)
EVENTS = st.one_of(
    st.builds(Inserted, UNITS, SIZES),
    st.builds(Evicted, UNITS),
    st.builds(Accessed, UNITS),
)


def policy_after(name: str, events: Sequence[Event]) -> EvictionPolicy:
    policy = POLICIES[name]()
    for event in events:
        policy.on_event(event)
    return policy


def held_after(events: Sequence[Event]) -> dict[int, int]:
    held: dict[int, int] = {}
    for event in events:
        if isinstance(event, Inserted):
            held[event.unit] = event.bytes
        elif isinstance(event, Evicted):
            held.pop(event.unit, None)
    return held


@EVERY
@given(events=st.lists(EVENTS, max_size=40), wanted=st.integers(-5, 300))
def test_victims_are_in_the_cache_and_no_more_than_needed(
    name: str, events: list[Event], wanted: int
) -> None:
    policy, held = policy_after(name, events), held_after(events)
    chosen = policy.victims(wanted)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(held)
    given_up = [held[unit] for unit in chosen]
    if name != "none":
        assert sum(given_up) >= min(wanted, sum(held.values()))
    assert sum(given_up[:-1]) < max(wanted, 1)


@EVERY
@given(events=st.lists(EVENTS, max_size=40), unit=UNITS, size=SIZES, room=st.integers(0, 60))
def test_there_can_be_room_for_every_admitted_unit(
    name: str, events: list[Event], unit: int, size: int, room: int
) -> None:
    policy, held = policy_after(name, events), held_after(events)
    if policy.admits(unit, size, room):
        assert room + sum(held[each] for each in policy.victims(size - room)) >= size


@EVERY
@given(events=st.lists(EVENTS, max_size=40), wanted=st.integers(0, 300))
def test_answers_depend_on_events_alone_and_change_nothing(
    name: str, events: list[Event], wanted: int
) -> None:
    one, other = policy_after(name, events), policy_after(name, events)
    first = list(one.victims(wanted))
    one.admits(1, 10, 0)
    assert [list(one.victims(wanted)), list(other.victims(wanted))] == [first, first]


FULL: list[Event] = [Inserted(unit, 10) for unit in range(4)]


def test_lru_evicts_the_longest_unread_first() -> None:
    policy = policy_after("lru", [*FULL, Accessed(0), Accessed(2), Accessed(99)])
    assert list(policy.victims(25)) == [1, 3, 0]


def test_lfu_evicts_the_least_often_read_first() -> None:
    policy = policy_after(
        "lfu", [*FULL, Accessed(0), Accessed(0), Accessed(1), Accessed(2), Accessed(1)]
    )
    assert list(policy.victims(40)) == [3, 2, 0, 1]
    policy.on_event(Evicted(0))
    policy.on_event(Inserted(0, 10))  # it begins anew
    assert list(policy.victims(20)) == [3, 0]


def test_none_never_evicts() -> None:
    policy = policy_after("none", FULL)
    assert policy.victims(40) == []
    assert policy.admits(9, 10, 10)
    assert not policy.admits(9, 10, 9)


def hits(name: str, epochs: int, units: int, capacity: int, seed: int = 0) -> float:
    """The hit rate of a cache of `capacity` units in the last of some epochs in random order."""
    policy, held, found = POLICIES[name](), set[int](), 0
    for epoch in range(epochs):
        found = 0
        for unit in np.random.default_rng([seed, epoch]).permutation(units).tolist():
            policy.on_event(Accessed(unit))
            if unit in held:
                found += 1
            elif policy.admits(unit, 1, capacity - len(held)):
                for gone in policy.victims(1 + len(held) - capacity):
                    held.discard(gone)
                    policy.on_event(Evicted(gone))
                held.add(unit)
                policy.on_event(Inserted(unit, 1))
            assert len(held) <= capacity
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
