"""What `PrefetchPlanner` pushes without a plan, against a simulated kernel."""

import numpy as np

from diesel_fs.mounts.prefetch.planner import PrefetchPlanner
from tests.rows import each_row

from .simulated_kernel import (
    CHUNK_ENTRIES,
    CHUNKS,
    ENTRY_BYTES,
    Machine,
    N,
    make_planner,
    next_push,
    push_next,
    shuffled,
    stream,
)


def test_a_miss_pushes_the_rest_of_its_chunk() -> None:
    machine = Machine(make_planner(N, 1.2), N)
    machine.open_and_read("x", 70)
    machine.run_until_idle()
    assert machine.planner.resident(np.arange(64, 128)).all()
    assert machine.pushed == CHUNK_ENTRIES - 1  # the READ itself has brought one


@each_row(("size", "later_s", "pushed"), [(4_096, 0.5, 63), (4_096, 2.0, 64), (2 << 20, 0.5, 64)])
def test_a_file_that_a_READ_has_just_brought_is_not_pushed(
    size: int, later_s: float, pushed: int
) -> None:
    """But they are if that was long ago, or if the file is large: a READ brings only a part."""
    planner = make_planner(256, 2, "oneshot", file_bytes=size)
    planner.missed(5, 100.0)
    push = next_push(planner, 100.0 + later_s)
    assert (push.chunk, len(push.entries)) == (0, pushed)
    assert (5 in push.entries.tolist()) is (pushed == 64)
    assert planner.resident([5])[0] == (pushed == 63)


def test_contents_that_a_READ_brought_and_were_dropped_are_pushed() -> None:
    machine = Machine(make_planner(N, 0.1), N)
    machine.open_and_read("x", 7)
    machine.run_until_idle()
    machine.planner.memory.set_budget(0)
    machine.run_until_idle()
    assert not machine.cached
    machine.planner.memory.set_budget(N * ENTRY_BYTES)
    machine.planner.streams.announce(stream("a", [*range(CHUNK_ENTRIES)]), machine.now_s)
    machine.run_until_idle()
    assert machine.cached == set(range(CHUNK_ENTRIES))


def test_random_misses_in_a_larger_dataset_never_thrash() -> None:
    machine = Machine(make_planner(N, 0.1), N)
    for entry in shuffled(1) + shuffled(2):
        machine.now_s += 0.001
        machine.open_and_read("x", entry)
        machine.run_until_idle()
        if not machine.planner.resident([entry])[0]:
            machine.cached.discard(entry)  # the kernel frees files that were not pushed
    assert machine.dropped == 0
    assert machine.planner.resident_set.bytes == int(0.1 * N) * ENTRY_BYTES
    assert 0.9 * 0.1 * N < machine.pushed < 0.1 * N  # the rest was brought by READs


def test_misses_are_wanted_while_one_may_lead_to_a_push() -> None:
    machine = Machine(make_planner(N, 0.1), N)
    planner = machine.planner
    for chunk in CHUNKS[: len(CHUNKS) // 10]:
        machine.open_and_read("x", chunk * CHUNK_ENTRIES)
        machine.run_until_idle()
        assert planner.wants_misses
    machine.open_and_read("x", N - 1)
    machine.run_until_idle()
    assert not planner.wants_misses  # nothing more has room
    machine.now_s += 5
    planner.opened(0, machine.now_s)
    planner.sampled(np.array([7]), np.array([False]))  # pages have gone, and those around it
    assert planner.wants_misses
    machine.run_until_idle()
    assert planner.resident(np.arange(CHUNK_ENTRIES)).all()
    assert not planner.wants_misses
    planner.streams.announce(stream("a", [7, 8]), machine.now_s)
    assert planner.wants_misses  # they are signs of the reader


def test_oneshot_fills_the_budget_missed_chunks_first() -> None:
    machine = Machine(make_planner(N, 0.1, "oneshot"), N)
    machine.open_and_read("x", N - 1)
    assert push_next(machine.planner, machine.now_s).chunk == CHUNKS[-1]
    machine.run_until_idle()
    assert machine.planner.resident_set.bytes == int(0.1 * N) * ENTRY_BYTES
    assert machine.planner.resident(np.arange(1_000)).all()
    assert machine.dropped == 0


def test_pages_that_are_freed_at_once_are_not_pushed_in_a_loop() -> None:
    """A chunk is pushed again after a second, not at each miss."""
    machine = Machine(make_planner(N, 1.2), N)
    for _ in range(100_000):
        machine.now_s += 0.001
        machine.open_and_read("x", 7)
        machine.run_until_idle()
        machine.cached.clear()
    assert 2 <= machine.pushes_of[0] <= 12


def test_forgotten_entries_are_pushed_again_when_missed() -> None:
    machine = Machine(make_planner(N, 1.2), N)
    machine.open_and_read("x", 0)
    machine.run_until_idle()
    machine.planner.forgotten(np.arange(64))
    machine.cached.clear()
    assert not machine.planner.resident(np.arange(64)).any()
    machine.now_s += 10
    machine.open_and_read("x", 0)
    machine.run_until_idle()
    assert machine.planner.resident(np.arange(64)).all()


def test_unknown_inodes_are_not_tried_again_at_once() -> None:
    machine = Machine(make_planner(N, 0.1), N, unknown=set(range(0, N, 2)))
    machine.planner.streams.announce(stream("a", list(range(N))), machine.now_s)
    machine.run_until_idle()
    pushes = machine.planner.stats()["pushes"]
    machine.run_until_idle()
    assert machine.planner.stats()["pushes"] == pushes
    assert machine.planner.stats()["absent_entries"] > 0


def test_files_that_never_fit_are_left_to_reads() -> None:
    size = np.array([1 << 30, 10, 0, 10], np.int64)
    planner = PrefetchPlanner(np.zeros(4, np.int64), size, 1, budget_bytes=1 << 20)
    machine = Machine(planner, 4)
    planner.streams.announce(stream("a", [0, 1, 2, 3]), machine.now_s)
    machine.run_until_idle()
    assert planner.resident([0, 1, 2, 3]).tolist() == [False, True, True, True]
