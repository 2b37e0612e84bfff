"""The choice of chunks that make room for others: laws over random states, without fetches."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.policies.costs import ReadCosts
from diesel_fs.orders.future import FutureUses, UnitOrder
from diesel_fs.peers.node.chunk_future import ChunkFuture
from diesel_fs.peers.node.ledger import Ledger
from diesel_fs.peers.node.replacement import TO_DISK, Replacement, UsesMin
from tests.examples import examples

from .ledgers import make_ledger, memory

COUNT = 8
CHUNKS = st.integers(0, COUNT - 1)
SETS = st.sets(CHUNKS)


def mask(chunks: set[int] | Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    found = np.zeros(COUNT, np.bool_)
    found[[*chunks]] = True
    return found


def future_of(ledger: Ledger, orders: Sequence[Sequence[int]]) -> ChunkFuture:
    units = [UnitOrder(np.array(each, np.uint32)) for each in orders]
    size = np.array(ledger.sizes, np.float64)
    return ChunkFuture(FutureUses(units, COUNT), size, size / 4)


def filled(
    here: set[int], owned: set[int], pinned: set[int], *, free_bytes: int = 0, policy: str = "lru"
) -> tuple[Ledger, Replacement]:
    budget = sum(100 + 10 * each for each in here) + free_bytes
    ledger, _ = make_ledger([*range(COUNT)], budget, policy=policy)
    ledger.set_owned(mask(owned))
    for chunk in sorted(here):
        ledger.insert(chunk, memory(ledger.sizes[chunk]))
    for chunk in pinned & here:
        ledger.pins.pin(1, chunk, ledger.memories[chunk])
    return ledger, Replacement(ledger, ReadCosts())


@examples(200)
@given(wanted=CHUNKS, here=SETS, owned=SETS, pinned=SETS, free_bytes=st.integers(0, 300))
def test_a_free_place_costs_no_chunk_of_this_node_and_fits_the_budget(
    wanted: int, here: set[int], owned: set[int], pinned: set[int], free_bytes: int
) -> None:
    here -= {wanted}
    ledger, replacement = filled(here, owned, pinned, free_bytes=free_bytes)
    placement = replacement.place_free(wanted)
    if placement is None:
        return
    assert not owned.intersection(placement.victims)
    assert not pinned.intersection(placement.victims), "their room would not come free"
    replacement.take(wanted, placement)
    assert ledger.used_bytes <= ledger.budget_bytes
    if wanted not in owned:
        absent = sum(ledger.sizes[each] for each in owned - here)
        assert ledger.used_bytes + absent <= ledger.budget_bytes, "the share has room first"


@examples(200)
@given(wanted=CHUNKS, here=SETS, owned=SETS, pinned=SETS, reads=st.integers(1, 200))
def test_any_placement_fits_the_budget_and_drops_nothing_that_is_pinned(
    wanted: int, here: set[int], owned: set[int], pinned: set[int], reads: int
) -> None:
    here -= {wanted}
    ledger, replacement = filled(here, owned, pinned)
    for _ in range(reads):  # until the chunk has paid for its place
        placement = replacement.place(wanted, 100, from_disk=False, is_new=True)
        if placement is not None:
            break
    else:
        return
    assert placement.to_memory, "there is no disk"
    assert not pinned.intersection(placement.victims)
    replacement.take(wanted, placement)
    assert ledger.used_bytes <= ledger.budget_bytes


@examples(200)
@given(
    wanted=CHUNKS,
    here=SETS,
    elsewhere=SETS,
    orders=st.lists(st.lists(CHUNKS, max_size=20), min_size=1, max_size=3),
)
def test_the_last_copy_that_a_reader_needs_does_not_leave_first(
    wanted: int, here: set[int], elsewhere: set[int], orders: list[list[int]]
) -> None:
    """All chunks but the wanted one are another node's."""
    here -= {wanted}
    ledger, replacement = filled(here, {wanted}, set())
    ledger.held_elsewhere = mask(elsewhere)
    replacement.set_future(future_of(ledger, orders))
    needed = {chunk for each in orders for chunk in each}
    placement = replacement.place_free(wanted)
    victims = set() if placement is None else set(placement.victims)
    assert not victims & (needed - elsewhere)


@examples(200)
@given(wanted=CHUNKS, here=SETS, order=st.lists(CHUNKS, min_size=1, max_size=30))
def test_the_plan_replaces_later_chunks_only(wanted: int, here: set[int], order: list[int]) -> None:
    here -= {wanted}
    ledger, replacement = filled(here, set(range(COUNT)), set(), policy="plan")
    replacement.set_future(future_of(ledger, [order]))
    placement = replacement.place(wanted, 100, from_disk=False, is_new=True)
    if wanted in order and placement is not None:
        later = order.index(wanted)
        assert all(order.index(each) > later for each in placement.victims if each in order)


@pytest.mark.parametrize(("reads", "victims"), [(40, [1]), (1, None)])
def test_the_plan_replaces_a_chunk_for_enough_earlier_reads(
    reads: int, victims: list[int] | None
) -> None:
    ledger, replacement = filled({1}, set(range(COUNT)), set(), policy="plan")
    replacement.set_future(future_of(ledger, [[0] * reads + [1]]))
    placement = replacement.place(0, 100, from_disk=False, is_new=True)
    assert (None if placement is None else [*placement.victims]) == victims


def test_a_chunk_that_the_plan_leaves_out_is_not_decided_again_until_something_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each miss of a full shuffle would take another decision."""
    ledger, replacement = filled({1}, set(range(COUNT)), set(), policy="plan")
    future = future_of(ledger, [[1, 0, *[0] * 40, 1]])
    replacement.set_future(future)
    decide, decisions = replacement._planned_victims, list[int]()

    def counted(chunk: int, uses_min: UsesMin) -> tuple[bool | None, list[int]]:
        decisions.append(chunk)
        return decide(chunk, uses_min)

    monkeypatch.setattr(replacement, "_planned_victims", counted)
    for _ in range(5):
        assert replacement.place(0, 100, from_disk=False, is_new=True) is None
    assert decisions == [0]
    assert ledger.counts["plan_bypassed"] == 5
    replacement.note_passed(future.uses.seek(0, 1))
    placement = replacement.place(0, 100, from_disk=False, is_new=True)
    assert placement is not None
    assert [*placement.victims] == [1]


def test_disk_victims_are_others_chunks_then_copies_then_by_policy() -> None:
    ledger, _ = make_ledger([*range(COUNT)], 10_000, queue_bytes=1000)
    replacement = Replacement(ledger, ReadCosts())
    for chunk in range(4):
        ledger.record_written(chunk)
    ledger.set_owned(mask([0, 1, 3, 7]))
    ledger.insert(1, memory(110))
    assert replacement.disk_victims(100) == [1], "in memory, too: the lower number"
    ledger.set_owned(mask([1, 3, 7]))
    assert replacement.disk_victims(100) == [0]
    assert replacement.disk_victims(330) == [0, 1, 2]
    assert replacement.disk_victims(331) == [0, 1, 2, 3], "and now by the policy"
    assert replacement.disk_victims(10_000) is None
    assert replacement.disk_victims(10_000, mask([2])) == [2], "as many as there are"


@pytest.mark.parametrize("is_full", [False, True])
def test_a_share_that_memory_has_no_room_for_goes_to_a_free_disk(is_full: bool) -> None:
    ledger, _ = make_ledger([*range(COUNT)], 0, queue_bytes=1000)
    replacement = Replacement(ledger, ReadCosts())
    ledger.disk_room_bytes = 50 if is_full else 500
    assert replacement.place_free(3) == (None if is_full else TO_DISK)
    ledger.set_owned(mask([]))
    assert replacement.place_free(3) is None, "chunks of other nodes take no room on the disk"
