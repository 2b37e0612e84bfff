"""`Eviction`: which resident entries without claims are dropped first."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.mounts.prefetch.eviction import BEHIND_DIVISOR, PIECE_ENTRIES
from diesel_fs.mounts.prefetch.resident_set import Ended, ResidentSet
from diesel_fs.mounts.prefetch.streams.farthest_uses import PIECE_POSITIONS
from diesel_fs.mounts.prefetch.streams.stream_tracker import StreamTracker
from diesel_fs.mounts.prefetch.streams.stream_views import STILL_S, StreamViews
from diesel_fs.mounts.prefetch.streams.units import PAGE_BYTES, Columns
from diesel_fs.orders.plan import Epoch
from tests.rows import each_row

from .simulated_kernel import shuffled, stream


class Memory:
    """Resident entries, and the streams of readers. Positions are counted in a stream."""

    def __init__(self, pages: Sequence[int], *orders: Sequence[list[int]]) -> None:
        """`pages` has the size of each entry, `orders` the epochs of each stream."""
        count = len(pages)
        columns = Columns(np.zeros(count, np.int32), np.array(pages, np.uint32), 1)
        self.pages = pages
        self.entries = ResidentSet(columns)
        self.trackers = {
            str(number): StreamTracker.of(columns, stream(str(number), *epochs), 0.0)
            for number, epochs in enumerate(orders)
        }
        self.views = StreamViews(self.trackers)
        self.views.find_still(0.0)
        self.entries.add(np.arange(count, dtype=np.uint32))

    def claim(self, entries: Sequence[int]) -> None:
        self.entries.claim(np.array(entries, np.uint32))

    def end_claims(self, entries: Sequence[int], why: Ended) -> None:
        self.claim(entries)
        self.entries.unclaim(np.array(entries, np.uint32), why)

    def drop(self, pages: int, *, only_unneeded: bool = False) -> list[int]:
        """Drop entries that take this many pages. Returns them in the order of the drops."""
        victims = self.entries.victims(pages * PAGE_BYTES, self.views, only_unneeded=only_unneeded)
        self.entries.victims_dropped(victims)
        found: list[int] = victims.tolist()
        return found

    def drop_all(self, pages: int, *, only_unneeded: bool = False) -> list[int]:
        """The same, as often as something is dropped."""
        found: list[int] = []
        while dropped := self.drop(pages, only_unneeded=only_unneeded):
            found += dropped
        return found


@each_row("pages", [1, 3, 1_000])
def test_entries_are_dropped_in_three_steps(pages: int) -> None:
    """Claims that were given up, in the order of the calls; entries that no reader comes to, those
    first that readers passed first; then those with the farthest next use."""
    memory = Memory([1] * 12, [[0, 1, 2, 3], [4, 5, 0]])
    for entry in (3, 10, 1):
        memory.end_claims([entry], "given up")
    for entry in (11, 9):
        memory.end_claims([entry], "passed")
    dropped = memory.drop_all(pages)
    assert dropped[:5] == [3, 10, 1, 11, 9]
    assert {*dropped[5:8]} == {6, 7, 8}
    assert dropped[8:] == [5, 4, 2, 0]


def test_entries_with_claims_are_not_dropped() -> None:
    memory = Memory([1] * 6, [[0, 1, 2]])
    memory.claim([1, 2, 4])
    assert sorted(memory.drop_all(2)) == [0, 3, 5]
    memory.entries.unclaim(np.array([2], np.uint32), "changed")
    assert memory.drop_all(2) == [2]


def test_entries_that_readers_come_to_again_can_be_spared() -> None:
    memory = Memory([1] * 8, [[0, 1, 2, 3], [1, 0, 5]])
    memory.end_claims([0, 5, 6], "passed")
    assert sorted(memory.drop_all(100, only_unneeded=True)) == [4, 6, 7]
    memory.trackers["0"].reader.move_to(4, 1.0)  # behind the first epoch
    memory.end_claims([0, 1, 2, 3], "passed")
    assert sorted(memory.drop_all(100, only_unneeded=True)) == [2, 3]
    assert memory.drop_all(1) == [5, 0, 1]


def test_entries_that_were_given_up_go_even_if_readers_come_to_them_again() -> None:
    memory = Memory([1] * 4, [[0, 1, 2, 3]])
    memory.end_claims([0], "given up")
    memory.end_claims([1], "changed")
    assert memory.drop_all(10, only_unneeded=True) == [0]


def test_entries_that_were_passed_and_are_read_again_wait_for_their_next_use() -> None:
    memory = Memory([1] * 6, [[0, 1, 2], [2, 0, 3, 1, 4, 5]])
    memory.trackers["0"].reader.move_to(3, 1.0)
    memory.end_claims([0, 1, 2], "passed")
    assert memory.drop_all(1) == [5, 4, 1, 3, 0, 2]


@each_row("needed", [1, 100, 2_500])
@each_row("why", ["passed", "given up", "changed"])
def test_hardly_more_is_dropped_than_needed(why: Ended, needed: int) -> None:
    """As few as take the needed bytes: only the last entry may exceed them."""
    order = shuffled(3, 4_000)
    pages = [1 + entry % 7 for entry in range(4_000)]
    memory = Memory(pages, [order[:2_000]])
    memory.end_claims(order[1_000:3_000], why)
    for _ in range(4):
        sizes = [pages[entry] for entry in memory.drop(needed)]
        assert needed <= sum(sizes) < needed + sizes[-1]


def test_what_a_still_stream_reads_is_not_needed() -> None:
    """Its reader has given no sign for a minute, and another one has."""
    memory = Memory([1] * 6, [[0, 1, 2]], [[5, 3]])
    assert sorted(memory.drop_all(9, only_unneeded=True)) == [4]
    later_s = STILL_S + 1
    memory.trackers["1"].reader.last_sign_s = later_s
    assert memory.views.find_still(later_s)
    assert not memory.views.find_still(later_s), "nothing has changed since"
    memory.entries.eviction.note_new_orders()
    uses = memory.views.next_use(np.arange(6, dtype=np.uint32))
    assert np.flatnonzero(np.isfinite(uses)).tolist() == [3, 5]
    assert sorted(memory.drop_all(9, only_unneeded=True)) == [0, 1, 2]
    memory.trackers["0"].reader.last_sign_s = later_s
    assert memory.views.find_still(later_s)
    assert np.isfinite(memory.views.next_use(np.arange(3, dtype=np.uint32))).all()
    assert memory.drop_all(1) == [3, 5]


def test_entries_of_a_withdrawn_stream_are_not_needed() -> None:
    memory = Memory([1] * 4, [[0, 1, 2, 3]])
    assert memory.drop(1, only_unneeded=True) == []
    del memory.trackers["0"]
    assert memory.views.find_still(0.0)
    memory.entries.eviction.note_new_orders()
    assert sorted(memory.drop_all(9, only_unneeded=True)) == [0, 1, 2, 3]


def test_an_order_that_becomes_known_saves_its_entries() -> None:
    memory = Memory([1] * 4, [[0, 1]])
    assert memory.drop(1) == [2]
    order = memory.trackers["0"].order
    order.extend(order.stream.extended([Epoch(1, np.array([3]))]))
    memory.entries.eviction.note_new_orders()
    assert memory.drop_all(9, only_unneeded=True) == []
    assert memory.drop_all(1) == [3, 1, 0]


def test_the_search_begins_again_if_many_were_passed_behind_it() -> None:
    """Their next use is farther than the search has come."""
    count = max(PIECE_ENTRIES, BEHIND_DIVISOR)
    near, far = list(range(count)), list(range(count, 2 * count))
    memory = Memory([1] * (2 * count), [[*near, *far]])
    memory.claim(far)
    assert memory.drop(1) == [near[-1]]
    memory.entries.unclaim(np.array(far, np.uint32), "passed")
    assert memory.drop(10) == far[:-11:-1]


# Against a plain model

COUNT = 24


def next_uses(memory: Memory, epochs: Sequence[list[int]]) -> dict[int, float]:
    """The next use of each entry that could be dropped, by going through the order."""
    ahead = list(chain.from_iterable(epochs))[memory.trackers["0"].reader.high :]
    uses = {}
    for entry in range(COUNT):
        if memory.entries.resident[entry] and not memory.entries.claims[entry]:
            uses[entry] = ahead.index(entry) if entry in ahead else np.inf
    return uses


Orders = st.lists(st.integers(0, COUNT - 1), min_size=1, unique=True)
Steps = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 8)),
    st.tuples(st.just("drop"), st.integers(1, 3)),
    st.tuples(st.just("push"), st.integers(0, COUNT - 1)),
)


@given(
    epochs=st.lists(Orders, min_size=1, max_size=2),
    restarts=st.booleans(),
    steps=st.lists(Steps, max_size=25),
)
def test_a_new_search_finds_one_of_the_entries_with_the_farthest_next_use(
    epochs: list[list[int]], restarts: bool, steps: list[tuple[str, int]]
) -> None:
    """A reader passes the entries that it has claimed. Whether the search has begun again or not,
    something is dropped if anything can be."""
    memory = Memory([1] * COUNT, epochs)
    reader, sequence = memory.trackers["0"].reader, list(chain.from_iterable(epochs))
    for step, number in steps:
        if step == "push":
            memory.entries.add(np.array([number], np.uint32))
        elif step == "read":
            passed = sequence[reader.high : reader.high + number]
            reader.move_to(reader.high + len(passed), 1.0)
            memory.end_claims(passed, "passed")
        else:
            if restarts:
                memory.entries.eviction.note_new_orders()
                memory.views.farthest.restart()
            for _ in range(number):
                uses = next_uses(memory, epochs)
                dropped = memory.drop(1)
                assert len(dropped) == min(len(uses), 1)
                if restarts:
                    assert all(uses[entry] == max(uses.values()) for entry in dropped)


def test_of_two_readers_the_farthest_uses_of_both_are_dropped() -> None:
    """Up to a piece of the search."""
    count = 5 * PIECE_POSITIONS
    memory = Memory([1] * (2 * count), [list(range(count))], [list(range(count, 2 * count))])
    while memory.entries.bytes > count * PAGE_BYTES:
        memory.drop(50)
    kept = memory.views.next_use(np.flatnonzero(memory.entries.resident).astype(np.uint32))
    assert kept.max() <= count // 2 + PIECE_POSITIONS
