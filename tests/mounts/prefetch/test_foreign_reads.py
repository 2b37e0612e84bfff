"""`PrefetchPlanner` with other programs that read, a store that fails, and streams that end."""

import random

import numpy as np
import pytest

from diesel_fs.errors import UsageError
from diesel_fs.mounts.prefetch.decisions import Idle, Push
from diesel_fs.mounts.prefetch.planner import PAUSE_S_MAX, PrefetchPlanner
from diesel_fs.mounts.prefetch.streams.stream_views import STILL_S
from diesel_fs.orders.plan import STREAMS_MAX, Epoch, Stream
from tests.rows import each_row

from .simulated_kernel import (
    CHUNKS,
    ENTRY_BYTES,
    Machine,
    N,
    Reader,
    chunk_wise,
    make_planner,
    next_push,
    pushed_ahead,
    shuffled,
    stream,
)


def reader_position(machine: Machine, name: str = "a") -> tuple[int, int]:
    found = next(each for each in machine.planner.stats()["streams"] if each["name"] == name)
    return found["epoch"], found["position"]


def test_an_old_list_and_a_new_plan_come_to_rest() -> None:
    """They must not take each other's memory in turns for ever."""
    machine = pushed_ahead(0.3, stream("list", shuffled(1), tentative=True))
    machine.now_s += STILL_S + 1
    machine.planner.streams.announce(stream("job", shuffled(2)), machine.now_s)
    machine.run_until_idle(2_000)


@pytest.mark.parametrize("budget", [0.02, 0.1])
def test_random_reads_of_another_program_do_not_move_the_reader(budget: float) -> None:
    entries = 200_000
    machine = Machine(make_planner(entries, budget), entries)
    order = shuffled(1, entries)
    machine.planner.streams.announce(stream("a", order), machine.now_s)
    machine.run_until_idle()
    strange = random.Random(3).choices(range(entries), k=24_000)
    machine.run({"a": Reader(order[:40_000], 5_000, 4), "stranger": Reader(strange, 3_000)})
    assert abs(reader_position(machine)[1] - 40_000) < 5_000
    assert machine.misses["a"] < 0.02 * 40_000


def test_a_small_list_is_followed_by_its_few_markers() -> None:
    machine = pushed_ahead(1.2, stream("list", list(range(100)), tentative=True))
    for entry in range(100):
        machine.open_and_read("list", entry)
    assert machine.misses["list"] == 0
    assert machine.planner.next(machine.now_s) is not None
    assert reader_position(machine, "list") == (-1, 0)


def test_an_epoch_ends_although_its_last_file_was_read_before() -> None:
    order = shuffled(1)
    machine = pushed_ahead(0.1, stream("a", order, shuffled(2)))
    machine.open_and_read("x", order[-1])
    machine.now_s += 3
    machine.run({"a": Reader(order, 20_000, start_s=machine.now_s - 100)})
    machine.run_until_idle()
    assert reader_position(machine)[0] == 1


def test_equal_epochs_are_read_one_after_the_other() -> None:
    """Each epoch begins with the same file, which must not count for a later epoch."""
    order = shuffled(1)[:200]
    machine = pushed_ahead(0.5, stream("a", *[order] * 8))
    machine.open_and_read("a", order[0])
    machine.run_until_idle()
    assert reader_position(machine) == (0, 1)


def test_many_misses_of_a_large_file_do_not_hide_others() -> None:
    sizes = np.full(1_001, ENTRY_BYTES)
    sizes[1_000] = 1 << 40
    chunk = np.append(np.arange(1_000) // 10, 100)
    test = PrefetchPlanner(chunk, sizes, 101, budget_bytes=2_000 * ENTRY_BYTES)
    test.missed(1_000, 100.0)
    assert test.wants_misses
    assert isinstance(test.next(100.0), Idle)


def test_a_reader_that_begins_again_is_found() -> None:
    """A script was stopped in the middle of an epoch and started again some seconds later."""
    order = shuffled(1)
    machine = pushed_ahead(0.1, stream("a", order))
    machine.run({"a": Reader(order[: N // 2], 20_000)})
    before = machine.misses["a"]
    machine.now_s += 6
    machine.run({"a": Reader(order, 20_000, start_s=machine.now_s - 100)})
    assert machine.misses["a"] - before < 0.02 * N
    machine.run_until_idle()
    assert reader_position(machine) == (-1, 0)


def test_pushing_goes_on_after_a_failure_of_the_store() -> None:
    machine = Machine(make_planner(N, 0.5), N)
    order = chunk_wise(CHUNKS, 20, 1)
    machine.planner.streams.announce(stream("a", order), machine.now_s)
    failures = 0
    while machine.now_s < 101.0:
        decision = machine.planner.next(machine.now_s)
        if isinstance(decision, Push):
            machine.watched.update(decision.markers.tolist())
            machine.planner.pushed(decision, [], [], machine.now_s, failed=True)
            failures += 1
            continue
        assert isinstance(decision, Idle)
        assert decision.until_s is not None
        machine.now_s = max(decision.until_s, machine.now_s + 0.001)
    assert 2 <= failures <= 4  # not one for each planned push
    machine.now_s += PAUSE_S_MAX
    machine.run_until_idle()
    machine.run({"a": Reader(order, 10_000, start_s=machine.now_s - 100)})
    assert machine.misses["a"] < 0.01 * N


@each_row("failed", [True, False])
def test_files_missing_from_a_push_are_pushed_again_only_if_it_failed(failed: bool) -> None:
    """Otherwise they are damaged, would be found damaged again, and are left to READs."""
    planner = make_planner(N, 1.2, "oneshot")
    push = next_push(planner, 100.0)
    planner.pushed(push, push.entries[:10], [], 100.0, failed=failed)
    if failed:
        assert isinstance(planner.next(100.1), Idle)
    following = next_push(planner, 101.0).entries.tolist()
    if failed:
        assert sorted(following) == sorted(push.entries[10:].tolist())
    else:
        assert not set(following) & set(push.entries.tolist())


def test_an_epoch_that_was_announced_in_parts_ends() -> None:
    order = shuffled(1)
    machine = pushed_ahead(0.1, stream("a", order[:1_000]))
    machine.planner.streams.extend("a", [Epoch(0, np.array(order[1_000:]))])
    machine.run({"a": Reader(order, 20_000)})
    machine.run_until_idle()
    assert reader_position(machine) == (-1, 0)


def test_ended_streams_get_no_share() -> None:
    machine = Machine(make_planner(N, 0.25), N)
    for number in range(15):
        machine.planner.streams.announce(stream(f"s{number}", [number]), machine.now_s)
        machine.run_until_idle()
        machine.open_and_read(f"s{number}", number)
        machine.run_until_idle()
    order = chunk_wise(CHUNKS, 20, 1)
    machine.pushes_of.clear()
    machine.planner.streams.announce(stream("a", order), machine.now_s)
    machine.run_until_idle()
    machine.run({"a": Reader(order, 10_000)})
    assert max(machine.pushes_of.values()) <= 2
    assert sum(machine.pushes_of.values()) < 1.1 * len(CHUNKS)


def test_a_new_stream_name_for_each_epoch_is_never_refused() -> None:
    machine = Machine(make_planner(N, 0.25), N)
    for number in range(STREAMS_MAX + 10):
        order = shuffled(number)[:100]
        machine.planner.streams.announce(stream(f"epoch-{number}", order), machine.now_s)
        machine.run_until_idle()
        for entry in order:
            machine.open_and_read("x", entry)
        machine.run_until_idle()
    assert len(machine.planner.stats()["streams"]) == STREAMS_MAX
    with pytest.raises(UsageError):
        machine.planner.streams.announce(stream("wrong", [N]), machine.now_s)
    assert len(machine.planner.stats()["streams"]) == STREAMS_MAX, "nothing made way for it"
    for number in range(STREAMS_MAX):  # streams under way are not removed
        machine.planner.streams.announce(stream(f"new-{number}", order), machine.now_s)
    with pytest.raises(UsageError):
        machine.planner.streams.announce(stream("more", order), machine.now_s)


def test_positions_may_exceed_2_to_the_31() -> None:
    """They do after some days of a short epoch."""
    machine = Machine(make_planner(N, 0.1), N)
    machine.planner.streams.announce(stream("a", shuffled(1)), machine.now_s)
    tracker = machine.planner.streams.trackers["a"]
    first = (1 << 31) + 5
    tracker.order.epochs.clear()
    tracker.order.end = tracker.claims.floor = tracker.reader.low = tracker.reader.high = first
    tracker.order.extend(Stream("a", (Epoch(1, np.array(shuffled(2))),)))
    machine.run_until_idle()
    [(position, _)] = tracker.claims.watched.take_unneeded(first + 1)
    assert position == first
    machine.open_and_read("a", shuffled(2)[0])
    assert reader_position(machine) == (1, 1)


def test_progress_back_to_passed_entries_pushes_them() -> None:
    order = shuffled(1)
    machine = pushed_ahead(0.2, stream("a", order))
    machine.planner.streams.progress("a", 15_000, machine.now_s)
    machine.run_until_idle()
    machine.planner.streams.progress("a", 14_700, machine.now_s)
    machine.run_until_idle()
    assert machine.planner.resident(order[14_700:15_000]).all()
