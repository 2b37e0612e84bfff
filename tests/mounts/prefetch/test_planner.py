"""`PrefetchPlanner` with plans, against a simulated kernel: contents are there in time, and the
budget holds.

`planner.py` and `stream_tracker.py` define the words used here: a stream's `low`, `high` and
`frontier`, claims, marker files, units. The dataset has N files of one page each, 64 in a chunk.
"""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diesel_fs.errors import UsageError
from diesel_fs.mounts.prefetch.decisions import Idle
from diesel_fs.mounts.prefetch.planner import PAUSE_S_MAX, PrefetchPlanner
from diesel_fs.mounts.prefetch.resident_set import ResidentSet
from diesel_fs.mounts.prefetch.streams.stream_tracker import StreamTracker
from diesel_fs.mounts.prefetch.streams.stream_views import TENTATIVE_S, StreamViews
from diesel_fs.mounts.prefetch.streams.units import PAGE_BYTES, Columns
from diesel_fs.orders.plan import Epoch, Stream
from tests.examples import examples
from tests.rows import each_row

from .simulated_kernel import (
    CHUNK_ENTRIES,
    CHUNKS,
    ENTRY_BYTES,
    START_S,
    Machine,
    N,
    Reader,
    chunk_wise,
    make_planner,
    next_push,
    push_next,
    pushed_ahead,
    shuffled,
    stream,
)


def budget(machine: Machine) -> int:
    return machine.planner.stats()["budget_bytes"]


def follow(
    orders: list[list[int]],
    part: float,
    workers: int = 1,
    rate: float = 20_000,
    pressure: float = 0.0,
) -> Machine:
    """Run one reader that follows a plan; the budget is `part` of the dataset."""
    machine = pushed_ahead(part, stream("a", *orders))
    everything = [entry for order in orders for entry in order]
    machine.run({"a": Reader(everything, rate, workers)}, pressure)
    assert machine.resident_bytes_max <= budget(machine)
    return machine


@each_row(
    ("orders", "part", "workers", "missed_max", "pushed_max", "pushes_of_chunk_max"),
    [
        *(([chunk_wise(CHUNKS, 10, 1)], 0.1, workers, missed, N, 1)
          for workers, missed in ((1, 0.0), (4, 0.02), (16, 0.02))),
        ([chunk_wise(CHUNKS, 10, seed) for seed in range(2)], 0.1, 4, 0.0, 2 * N, 2),
        *(([shuffled(1), shuffled(2)], 0.1, workers, 0.02, 3 * N, N) for workers in (1, 16)),
        ([shuffled(1), shuffled(2)], 0.6, 4, 0.02, 1.9 * N, N),
        ([shuffled(1), shuffled(2)], 1.2, 4, 0.0, N, N),
    ],
    ids=[
        "chunk-wise", "by 4 workers", "by 16 workers", "two epochs", "random", "by many workers",
        "what the next epoch reads first is kept", "all fits",
    ],
)  # fmt: skip
def test_an_order_misses_little_and_fetches_little_twice(
    orders: list[list[int]],
    part: float,
    workers: int,
    missed_max: float,
    pushed_max: float,
    pushes_of_chunk_max: int,
) -> None:
    """With memory for 10 % of the dataset, a chunk-wise order misses at most 2 %, and no chunk is
    pushed twice; the second epoch is pushed before the first ends."""
    machine = follow(orders, part, workers)
    assert machine.misses["a"] <= missed_max * len(orders) * N
    assert N <= machine.pushed <= pushed_max
    assert max(machine.pushes_of.values()) <= pushes_of_chunk_max
    if part > 1:
        assert machine.dropped == 0


def ranks_and_validation() -> tuple[Machine, dict[str, Reader]]:
    """Eight ranks, which read parts of one chunk-wise order, and a reader of a validation set."""
    entries = 4 * N
    train = chunk_wise(list(range(entries // CHUNK_ENTRIES * 7 // 8)), 4, 3)
    held_out = list(range(entries * 7 // 8, entries))
    machine = Machine(make_planner(entries, 0.1), entries)
    readers = {}
    per_rank = len(train) // 8
    for rank in range(8):
        order = train[rank * per_rank : (rank + 1) * per_rank]
        machine.planner.streams.announce(stream(f"rank{rank}", order), machine.now_s)
        readers[f"rank{rank}"] = Reader(order, 4_000, 4)
    machine.planner.streams.announce(stream("validation", held_out), machine.now_s)
    readers["validation"] = Reader(held_out, 8_000, 4, start_s=1.0)
    return machine, readers


def test_eight_ranks_and_a_validation_set_share_one_budget() -> None:
    machine, readers = ranks_and_validation()
    machine.run_until_idle()
    machine.run(readers)
    for name in readers:
        assert machine.misses[name] <= 0.02 * machine.reads[name], (name, machine.misses)
    assert machine.resident_bytes_max <= budget(machine)
    assert max(machine.pushes_of.values()) <= 2  # the parts of two ranks may share a chunk


def test_two_streams_share_their_pushes() -> None:
    """Two readers of one order, one of them 500 files behind: each file is pushed once for both."""
    order = chunk_wise(CHUNKS, 4, 5)
    machine = pushed_ahead(0.3, stream("a", order), stream("b", order))
    machine.run({"a": Reader(order, 10_000), "b": Reader(order, 10_000, start_s=0.05)})
    assert machine.misses["a"] + machine.misses["b"] <= 0.02 * 2 * N
    assert machine.pushed <= 1.02 * N


def test_a_stream_that_stands_still_gives_its_memory_up() -> None:
    """After a minute without a sign of its reader, while another stream is read, its claims end,
    and the other stream gets the memory."""
    machine = pushed_ahead(0.1, stream("still", shuffled(1)))
    order = shuffled(2)
    machine.now_s += 100
    machine.planner.streams.announce(stream("read", order), machine.now_s)
    machine.run_until_idle()
    for position, entry in enumerate(order[:8_192]):
        machine.now_s += 0.01
        machine.open_and_read("read", entry)
        if position % 32 == 0:
            machine.run_until_idle()
    still, read = machine.planner.stats()["streams"]
    assert still["frontier"] == 0
    assert read["frontier"] - read["low"] > 0.08 * N
    assert machine.misses["read"] <= 0.02 * 8_192


def test_a_still_stream_gets_memory_again_after_its_first_reads() -> None:
    first, second = shuffled(1), shuffled(2)
    machine = pushed_ahead(0.1, stream("still", first), stream("busy", second))
    for entry in second[:8_192]:
        machine.now_s += 0.01
        machine.open_and_read("busy", entry)
        machine.run_until_idle()
    assert machine.planner.stats()["streams"][0]["frontier"] <= 0.05 * N
    for entry in first[:2_048]:
        machine.now_s += 0.01
        machine.open_and_read("still", entry)
        machine.run_until_idle()
    assert machine.misses["still"] <= 300


def test_the_lead_of_a_stream_is_the_time_until_its_reader_has_no_more_claims() -> None:
    """A reader beyond its claims has none: the worker would wait for ever with less than 0."""
    machine = pushed_ahead(0.1, stream("a", shuffled(1)))
    assert machine.planner.views.lead_s() == 0  # no rate is known yet
    machine.planner.streams.progress("a", 256, machine.now_s)
    tracker = machine.planner.views.trackers["a"]
    tracker.reader.rate = 1_000.0
    claimed = tracker.order.claimed_end()
    assert machine.planner.views.lead_s() == pytest.approx((claimed - 256) / 1_000)
    machine.planner.streams.progress("a", N // 2, machine.now_s)
    assert claimed < N // 2
    tracker.reader.rate = 1_000.0
    assert machine.planner.views.lead_s() == 0
    assert make_planner(N, 0.1).views.lead_s() == 0


def test_a_replaced_rest_of_an_epoch_is_pushed() -> None:
    old, new = chunk_wise(CHUNKS, 10, 1), chunk_wise(CHUNKS, 10, 2)
    machine = pushed_ahead(0.1, stream("a", old))
    half = Reader(old[: N // 2], 20_000, 4)
    machine.run({"a": half})
    machine.planner.streams.replace("a", Epoch(0, np.array(new[N // 2 :])), N // 2)
    machine.run_until_idle()
    before = machine.misses["a"]
    machine.run({"a": Reader(new[N // 2 :], 20_000, 4, start_s=machine.now_s - START_S)})
    assert before <= 0.02 * N
    assert machine.misses["a"] - before <= 0.02 * N
    assert machine.resident_bytes_max <= budget(machine)


def test_a_wrong_prediction_is_replaced_when_its_epoch_starts() -> None:
    first, guess, true = shuffled(1), shuffled(2), shuffled(3)
    machine = pushed_ahead(0.1, stream("a", first, guess))
    machine.run({"a": Reader(first, 20_000)})
    machine.planner.streams.replace("a", Epoch(1, np.array(true)))
    machine.run_until_idle()
    machine.run({"a": Reader(true, 20_000, start_s=machine.now_s - START_S)})
    assert machine.misses["a"] <= 0.01 * N


def test_a_reader_that_starts_in_the_middle_is_found() -> None:
    order = shuffled(1)
    machine = pushed_ahead(0.1, stream("a", order))
    rest = order[N // 2 :]
    machine.run({"a": Reader(rest, 20_000)})
    assert machine.misses["a"] <= 0.05 * len(rest)


def test_progress_that_a_reader_reports_overrides_opens_of_marker_files() -> None:
    order = shuffled(1)
    machine = pushed_ahead(0.1, stream("a", order))
    machine.planner.streams.progress("a", N // 2, machine.now_s)
    machine.run_until_idle()
    assert machine.planner.resident(order[N // 2 : N // 2 + 1_000]).all()
    machine.planner.streams.progress("a", 100, machine.now_s)
    machine.run_until_idle()
    assert machine.planner.resident(order[100:400]).all()
    with pytest.raises(UsageError):
        machine.planner.streams.progress("a", N + 1, machine.now_s)


@each_row("order", [shuffled(1), chunk_wise(CHUNKS, 4, 1)])
def test_pushes_are_those_that_were_foreseen(order: list[int]) -> None:
    """In the same order, too: a reader finds what it has begun to fetch by it."""
    planner = make_planner(N, 0.1)
    planner.streams.announce(stream("a", order), START_S)
    push_next(planner)
    foreseen = planner.upcoming(4)
    pushed = [push_next(planner).entries for _ in foreseen]
    assert [unit.tolist() for unit in pushed] == [unit.tolist() for unit in foreseen]


def test_resident_files_are_not_fetched_ahead() -> None:
    planner = make_planner(N, 0.5)
    planner.streams.announce(stream("a", shuffled(1)), START_S)
    push_next(planner)
    foreseen = planner.upcoming(4)
    already = np.concatenate([unit[::3] for unit in foreseen])
    assert planner.take_over(already, START_S)
    left: set[int] = set(np.concatenate(planner.upcoming(4)).tolist())
    assert left == set(np.concatenate(foreseen).tolist()) - set(already.tolist())


def test_freed_pages_are_pushed_again() -> None:
    machine = follow([shuffled(1)], 0.2, 4, rate=2_000, pressure=0.02)
    unaided = follow([shuffled(1)], 0.2, 4, rate=2_000)
    assert unaided.misses["a"] == 0
    assert machine.misses["a"] <= 0.1 * N
    assert machine.planner.stats()["lost_entries"] > 0


@each_row("freed, pushed_again", [(1, (0, 0)), (6, (0, 8)), (64, (55, 64))])
def test_only_what_the_kernel_has_freed_is_pushed_again(
    freed: int, pushed_again: tuple[int, int]
) -> None:
    """A READ shows that one file has gone. A sample then shows whether its neighbours have, too."""
    order = chunk_wise(CHUNKS, 4, 1)
    machine = pushed_ahead(1.2, stream("a", order))
    machine.now_s += 10
    machine.planner.streams.progress("a", 10, machine.now_s)
    chunk = [entry for entry in order if entry // CHUNK_ENTRIES == order[0] // CHUNK_ENTRIES]
    gone = chunk[:: len(chunk) // freed][:freed]
    machine.cached.difference_update(gone)
    before = machine.pushed
    machine.open_and_read("a", gone[0])
    machine.run_until_idle()
    assert pushed_again[0] <= machine.pushed - before <= pushed_again[1]


def test_freed_files_of_many_chunks_are_pushed_again_together() -> None:
    order = shuffled(1)
    machine = pushed_ahead(1.2, stream("a", order))
    machine.now_s += 10
    machine.planner.streams.progress("a", 10, machine.now_s)
    gone = order[100:130]
    machine.cached.difference_update(gone)
    machine.planner.sampled(np.array(gone), np.zeros(len(gone), np.bool_))
    before = machine.planner.stats()["pushes"]
    machine.run_until_idle()
    assert machine.planner.resident(gone).all()
    assert machine.planner.stats()["pushes"] - before <= 3


def test_a_tentative_stream_costs_nothing_until_it_is_followed() -> None:
    """One read may be another program's."""
    machine = pushed_ahead(0.1, stream("a", shuffled(1)))
    pushed = machine.pushed
    listed = shuffled(2)
    machine.planner.streams.announce(stream("list", listed, tentative=True), machine.now_s)
    machine.run_until_idle()
    assert (machine.pushed, machine.dropped) == (pushed, 0)
    machine.open_and_read("list", listed[0])
    assert machine.planner.stats()["streams"][1]["tentative"]
    for entry in listed[1:6]:
        machine.open_and_read("list", entry)
    machine.run_until_idle()
    assert machine.planner.resident(listed[300:600]).all()


def test_a_list_that_nobody_follows_is_withdrawn() -> None:
    machine = pushed_ahead(0.1, stream("list", shuffled(2), tentative=True))
    decision = machine.planner.next(machine.now_s + 500)
    assert decision == Idle(machine.now_s + TENTATIVE_S)
    machine.now_s += TENTATIVE_S
    machine.run_until_idle()
    assert machine.planner.stats()["streams"] == []
    assert not machine.watched


def test_files_between_workers_that_read_far_apart_are_kept() -> None:
    """Two workers read 2,000 files apart, although the stream has said 512."""
    order = shuffled(1)
    machine = pushed_ahead(0.3, stream("a", order, lag=512))
    for position in range(2_000, 12_000):
        machine.now_s += 0.001
        machine.open_and_read("a", order[position])
        machine.open_and_read("a", order[position - 2_000])
        machine.run_until_idle()
    assert machine.misses["a"] <= 0.1 * N


def test_a_smaller_budget_drops_the_farthest_files() -> None:
    order = shuffled(1)
    machine = pushed_ahead(0.2, stream("a", order))
    machine.planner.memory.set_budget(int(0.05 * N * ENTRY_BYTES))
    machine.run_until_idle()
    assert machine.planner.resident_set.bytes <= 0.05 * N * ENTRY_BYTES
    assert machine.planner.resident(order[:300]).all()


@pytest.mark.parametrize(("known", "charged"), [(N // 10, N // 10 * 1_150), (N, None)])
def test_names_that_the_kernel_knows_count_in_the_budget(known: int, charged: int | None) -> None:
    """Each takes 1,150 bytes of it, but all together at most an eighth."""
    budget = int(0.5 * N * ENTRY_BYTES)
    planner = make_planner(N, 0.5)
    planner.memory.set_known_entries(known)
    machine = Machine(planner, N)
    planner.streams.announce(stream("a", shuffled(1)), machine.now_s)
    machine.run_until_idle()
    room = budget - (budget // 8 if charged is None else charged)
    assert 0.9 * room < planner.resident_set.bytes <= room


@pytest.fixture
def filled() -> Machine:
    """A machine with its budget filled by 32 chunks that were missed."""
    machine = Machine(make_planner(N, 0.1), N)
    for chunk in range(32):
        machine.planner.missed(chunk * CHUNK_ENTRIES, machine.now_s)
    machine.run_until_idle()
    assert machine.planner.resident(np.arange(2_048)).all()
    return machine


@pytest.mark.parametrize("switches", [False, True])
def test_the_least_valuable_are_dropped_first(filled: Machine, switches: bool) -> None:
    """Another version takes over the importances."""
    precious, twos = np.arange(512, 1_536), np.full(1_024, 2, np.float32)
    planner = filled.planner
    assert planner.importances.set(precious, twos) == 1
    if switches:
        filled.run_until_idle()
        planner = make_planner(N, 0.1)
        planner.inherit(filled.planner, np.arange(N, dtype=np.int32))
        filled = Machine(planner, N)
    planner.streams.announce(stream("a", list(range(N - 1_024, N))), filled.now_s)
    filled.run_until_idle()
    assert planner.resident(precious).all()
    assert planner.resident(np.arange(N - 1_024, N)).all()
    assert planner.importances.set(precious, twos, job="a") == (1 if switches else 2)  # jobs


def test_important_entries_that_are_still_read_outlive_more_important_ones() -> None:
    """However many of the least important ones a reader still comes to."""
    count = 20_000
    everything = np.arange(count, dtype=np.uint32)
    columns = Columns(np.zeros(count, np.int32), np.ones(count, np.uint32), 1)
    entries = ResidentSet(columns)
    entries.eviction.set_importances(everything, 1 + everything.astype(np.float32))
    entries.add(everything)
    needed = count * 3 // 4
    tracker = StreamTracker.of(columns, Stream("a", (Epoch(0, everything[:needed]),)), 0.0)
    reader = StreamViews({"a": tracker})
    reader.find_still(0.0)
    victims = entries.victims(1000 * PAGE_BYTES, reader)
    assert len(victims) >= 1000
    assert victims.min() >= needed
    entries.victims_dropped(victims)
    rest = entries.victims(count * PAGE_BYTES, reader)
    assert len(rest) == count - len(victims)  # all go if all have to


def test_the_value_of_a_chunk_is_that_of_the_files_that_this_mount_does_not_keep() -> None:
    """With and without `keeps_important`."""
    chunk = np.repeat([0, 1, 2], 10)
    importance = np.where(np.arange(30) < 6, 1.0, 0.25).astype(np.float32)  # a fifth of all
    for keeps, of_first in ((True, 1.0), (False, 7.0)):
        planner = PrefetchPlanner(
            chunk, np.full(30, 4096), 3, budget_bytes=1 << 20, keeps_important=keeps
        )
        assert planner.importances.take_chunk_values() is None
        planner.importances.set(np.arange(30, dtype=np.uint32), importance)
        values = planner.importances.take_chunk_values()
        assert values is not None
        assert values.tolist() == pytest.approx([of_first, 2.5, 2.5])
        assert planner.importances.take_chunk_values() is None  # nothing is new
        planner.importances.set(np.arange(30, dtype=np.uint32), importance * np.float32(0.5))
        assert planner.importances.take_chunk_values() is None  # not sorted yet
        for _ in range(3):
            assert isinstance(planner.next(0.0), Idle)
        values = planner.importances.take_chunk_values()
        assert values is not None
        assert values.tolist() == pytest.approx([of_first / 2, 1.25, 1.25])


def test_a_stream_leaves_the_important_entries_in_memory() -> None:
    """A full random order takes memory only for the files that its reader comes to soon."""
    planner = make_planner(N, 0.1)
    machine = Machine(planner, N)
    for chunk in range(32):
        planner.missed(chunk * CHUNK_ENTRIES, machine.now_s)
    machine.run_until_idle()
    everything = np.arange(N)
    importance = np.where(everything < 2_048, 0.9, 0.1).astype(np.float32)
    planner.importances.set(everything, importance)
    before = np.count_nonzero(planner.resident(everything[:2_048]))
    order = [each for each in shuffled(1) if each >= 2_048]
    planner.streams.announce(stream("a", order), machine.now_s)
    planner.streams.progress("a", 0, machine.now_s)
    machine.run_until_idle()
    assert np.count_nonzero(planner.resident(everything[:2_048])) > 0.7 * before
    assert planner.resident(order[:32]).all()


def test_files_that_were_given_up_and_claimed_again_were_not_kept() -> None:
    """The memory becomes smaller for a moment, so a stream gives up some of its claims."""
    machine = pushed_ahead(0.2, stream("a", shuffled(1)))
    planner = machine.planner
    budget, claimed = planner.memory.budget_bytes, np.count_nonzero(planner.resident_set.claims)
    planner.memory.set_budget(budget * 3 // 4)
    machine.run_until_idle()
    assert np.count_nonzero(planner.resident_set.claims) < claimed
    planner.memory.set_budget(budget)
    machine.run_until_idle()
    assert np.count_nonzero(planner.resident_set.claims) >= claimed
    assert planner.stats()["kept_entries"] == 0


def test_resident_entries_of_a_plan_are_not_dropped_for_earlier_ones(filled: Machine) -> None:
    order = [*range(N - 1_024, N), *range(1_024)]
    filled.planner.streams.announce(stream("a", order), filled.now_s)
    filled.run_until_idle()
    assert filled.planner.resident(order).all()
    assert filled.pushed == 2_048 + 1_024 - 32  # the 32 misses brought a file each by themselves


def test_files_of_many_chunks_are_pushed_in_mixed_units() -> None:
    planner = make_planner(N, 0.1)
    planner.streams.announce(stream("a", list(range(0, N, CHUNK_ENTRIES))), 0.0)
    first = next_push(planner, 0.0)
    assert (first.chunk, len(first.entries)) == (-1, 256)
    assert first.markers.tolist() == [0]
    with pytest.raises(AssertionError):
        planner.next(0.0)  # needs a report of the last decision


def test_units_shrink_as_streams_join() -> None:
    """Four streams announced one after the other: the units of the first were cut for the whole
    budget, and groups of 40 chunks would not fit a quarter of it."""
    machine = Machine(make_planner(N, 0.4), N)
    orders = [chunk_wise(CHUNKS, 40, seed) for seed in range(4)]
    for number, order in enumerate(orders):
        machine.planner.streams.announce(stream(str(number), order), machine.now_s)
        machine.run_until_idle()
    machine.run({str(number): Reader(order, 5_000) for number, order in enumerate(orders)})
    assert sum(machine.misses.values()) <= 0.02 * 4 * N


def test_read_epochs_and_withdrawn_streams_are_removed() -> None:
    planner = make_planner(N, 0.1)
    planner.streams.announce(stream("a", [1], [2]), 0.0)
    planner.streams.progress("a", 1, 1.0, epoch=1)
    planner.next(1.0)
    assert planner.views.plan["a"].epochs == ()
    planner.streams.withdraw("a")
    for wrong in (planner.streams.withdraw, lambda name: planner.streams.extend(name, [])):
        with pytest.raises(UsageError, match="no stream"):
            wrong("a")


def test_a_change_of_the_plan_that_is_refused_changes_nothing() -> None:
    planner = make_planner(N, 0.1)
    planner.streams.announce(stream("a", shuffled(1)), 0.0)
    before = planner.stats()
    wrongs: list[Callable[[], object]] = [
        lambda: planner.streams.announce(stream("b", [N]), 0.0),
        lambda: planner.streams.extend("a", [Epoch(0, np.array([N]))]),
        lambda: planner.streams.replace("a", Epoch(3, np.array([1]))),
        lambda: planner.streams.replace("a", Epoch(0, np.array([N]))),
        lambda: planner.streams.withdraw("b"),
        lambda: planner.importances.set([1], np.array([np.nan], np.float32)),
        lambda: planner.importances.set([1], np.array([-1], np.float32)),
        lambda: planner.importances.set([N], np.array([1], np.float32)),
        lambda: planner.forgotten([-1]),
    ]
    for wrong in wrongs:
        with pytest.raises(UsageError):
            wrong()
    assert planner.stats() == before


class AnyReports(RuleBasedStateMachine):
    """Reports to the planner in any order keep it consistent, and it always becomes idle."""

    @initialize(part=st.floats(0.05, 1.5), oneshot=st.booleans())
    def start(self, part: float, oneshot: bool) -> None:
        self.machine = Machine(
            make_planner(1_024, part, "oneshot" if oneshot else "on-demand"), 1_024
        )

    @property
    def planner(self) -> PrefetchPlanner:
        return self.machine.planner

    orders = st.one_of(
        st.lists(st.integers(0, 1_023), max_size=50),
        st.integers(0, 99).map(lambda seed: shuffled(seed, 1_024)),
        st.integers(0, 99).map(lambda seed: chunk_wise(list(range(16)), 3, seed)),
    )
    names = st.sampled_from("abc")

    @rule(name=names, order=orders, more=orders, tentative=st.booleans())
    def announce(self, name: str, order: list[int], more: list[int], tentative: bool) -> None:
        self.planner.streams.announce(
            stream(name, order, more, tentative=tentative), self.machine.now_s
        )

    @rule(name=names, order=orders, at=st.integers(0, 9))
    def replace(self, name: str, order: list[int], at: int) -> None:
        if name not in self.planner.views.plan:
            return
        for number in (0, 1):
            try:
                self.planner.streams.replace(name, Epoch(number, np.array(order)), at)
            except UsageError:
                continue

    @rule(name=names, order=orders, number=st.integers(0, 9))
    def extend(self, name: str, order: list[int], number: int) -> None:
        if name in self.planner.views.plan:
            try:
                self.planner.streams.extend(name, [Epoch(number, np.array(order))])
            except UsageError:
                return

    @rule(name=names)
    def withdraw(self, name: str) -> None:
        if name in self.planner.views.plan:
            self.planner.streams.withdraw(name)

    @rule(name=names, position=st.integers(0, 1_024))
    def progress(self, name: str, position: int) -> None:
        if name in self.planner.views.plan:
            try:
                self.planner.streams.progress(name, position, self.machine.now_s)
            except UsageError:
                return

    @rule(entries=st.lists(st.integers(0, 1_023), min_size=1, max_size=20))
    def read(self, entries: list[int]) -> None:
        for entry in entries:
            self.machine.open_and_read("x", entry)

    @rule(entries=st.lists(st.integers(0, 1_023), max_size=20))
    def forget(self, entries: list[int]) -> None:
        self.machine.cached.difference_update(entries)
        self.planner.forgotten(np.array(entries, np.int64))

    @rule(share=st.integers(1, 5))
    def pressure(self, share: int) -> None:
        self.machine.cached = {entry for entry in self.machine.cached if entry % share}

    @rule(seconds=st.sampled_from([0.01, 1.5, 30.0, 61.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.machine.now_s += seconds

    @rule(part=st.floats(0, 1.5))
    def budget(self, part: float) -> None:
        self.planner.memory.set_budget(int(part * 1_024 * ENTRY_BYTES))

    @rule(steps=st.integers(1, 8))
    def work(self, steps: int) -> None:
        for _ in range(steps):
            self.machine.run_decision()

    @rule(name=names, order=orders, position=st.integers(0, 1_024))
    def announce_during_a_push(self, name: str, order: list[int], position: int) -> None:
        """The worker answers requests while it waits for contents."""

        def happens() -> None:
            self.progress(name, position)
            self.replace(name, order, position % 10)
            self.withdraw(name)
            self.announce(name, order, [], tentative=False)

        self.machine.meanwhile = happens

    @rule(steps=st.integers(1, 8))
    def work_with_a_store_that_fails(self, steps: int) -> None:
        self.machine.failing = True
        self.work(steps)
        self.machine.failing = False

    @rule()
    def rest(self) -> None:
        self.machine.now_s += PAUSE_S_MAX  # after failures
        self.machine.run_until_idle(2_000)
        stats = self.planner.stats()
        assert stats["resident_bytes"] <= stats["budget_bytes"]
        following = [each for each in stats["streams"] if not each["tentative"]]
        if len(stats["streams"]) == 1 and following and following[0]["epoch"] >= 0:
            room = stats["budget_bytes"] - stats["resident_bytes"]
            if room > 1_024 * ENTRY_BYTES // 2:
                assert following[0]["frontier"] >= following[0]["length"]  # nothing left to do

    @precondition(lambda self: hasattr(self, "machine"))
    @invariant()
    def counts_of_resident_bytes_and_claims_add_up(self) -> None:
        resident = self.planner.resident(np.arange(1_024))
        assert self.planner.resident_set.bytes == int(np.count_nonzero(resident)) * ENTRY_BYTES
        believed = self.planner.resident_set
        assert (believed.claims >= 0).all()
        unclaimed = believed.resident & (believed.claims == 0)
        assert believed.unclaimed_bytes == int(np.count_nonzero(unclaimed)) * ENTRY_BYTES
        assert set(self.planner.watches.users) <= self.machine.watched


TestAnyReports = AnyReports.TestCase
TestAnyReports.settings = examples(60, steps=40)


# Reports to the task's master: the epochs of streams, and how far they are claimed or read


def whole(*numbers: int) -> tuple[Epoch, ...]:
    return tuple(Epoch(number, np.arange(64, dtype=np.uint32)) for number in numbers)


def test_claimed_files_need_not_be_fetched_again() -> None:
    planner = make_planner(64, 1, chunk_entries=8)
    assert planner.views.progress_of_streams() == {}
    known = whole(3, 4)
    planner.streams.announce(Stream("train", known), START_S)
    assert planner.views.progress_of_streams() == {"train": (known, 3, 0)}
    push = push_next(planner)
    planner.next(START_S)
    epochs, epoch, position = planner.views.progress_of_streams()["train"]
    assert (epochs, epoch) == (known, 3)
    assert position >= len(push.entries) > 0, "before the reader has read anything"


def test_a_reader_ahead_of_the_pushes_counts_as_far_as_it_is() -> None:
    """A stream that nobody follows yet is not reported."""
    planner = make_planner(64, 1, chunk_entries=8)
    planner.streams.announce(Stream("list", whole(0), tentative=True), 0.0)
    planner.streams.announce(Stream("train", whole(3, 4)), 0.0)
    planner.streams.progress("train", 40, 1.0)
    assert planner.views.progress_of_streams()["train"][1:] == (3, 40)
    planner.streams.progress("train", 64, 2.0)
    assert planner.views.progress_of_streams()["train"][1:] == (4, 0)
    assert list(planner.views.progress_of_streams()) == ["train"]
