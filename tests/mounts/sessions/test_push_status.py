"""The memory that server and worker share: which files are pushed soon, how long a READ is held."""

import os
import time

import numpy as np
import trio
import trio.lowlevel
import trio.testing

from diesel_fs.mounts.sessions.push_status import (
    HOLD_STEP_S,
    HOLD_STEPS,
    MISS_INTERVAL_S,
    STILL_STEPS,
    PushStatusMap,
    push_status_file,
)


def both_sides(entry_count: int = 1000) -> tuple[PushStatusMap, PushStatusMap]:
    descriptor = push_status_file(entry_count)
    server = PushStatusMap(descriptor)
    worker = PushStatusMap(descriptor)
    os.close(descriptor)
    return server, worker


def soon_entries(side: PushStatusMap) -> list[int]:
    return [entry for entry in range(1000) if side.is_soon(entry)]


def test_marked_entries_are_soon_until_others_are_marked() -> None:
    server, worker = both_sides()
    assert soon_entries(server) == []
    worker.mark_soon(np.array([3, 999, 0], np.uint32))
    assert soon_entries(server) == [0, 3, 999]
    worker.mark_soon(np.array([3, 4], np.uint32))
    assert soon_entries(server) == [3, 4]
    worker.mark_soon(np.empty(0, np.uint32))
    assert soon_entries(server) == []


def test_the_worker_leaves_out_entries_whose_READ_is_held() -> None:
    server, worker = both_sides()
    worker.mark_soon(np.array([4, 5, 6], np.uint32))
    assert server.try_hold(5)
    entries = np.array([4, 5, 6])
    assert worker.mark_now(entries).tolist() == [False, True, False]
    server.end_hold(5)
    assert not worker.mark_now(entries).any()


def test_a_READ_of_an_entry_that_is_being_stored_is_not_held() -> None:
    """Otherwise both would wait: the worker waits for the page that the READ has locked."""
    server, worker = both_sides()
    assert not server.try_hold(4)  # not marked as soon
    worker.mark_soon(np.array([4, 5], np.uint32))
    worker.mark_now(np.array([4]))
    assert not server.try_hold(4)
    assert server.try_hold(5)
    worker.mark_soon(np.array([5], np.uint32))
    assert not server.try_hold(4)


def test_a_number_that_is_no_entry_is_never_held() -> None:
    server, worker = both_sides(1000)
    worker.mark_soon(np.arange(1000, dtype=np.uint32))
    assert [server.try_hold(entry) for entry in (-1, 1000, 1 << 62)] == [False] * 3


def test_few_of_many_misses_are_reported_if_the_worker_wants_few() -> None:
    server, worker = both_sides()
    assert all(server.takes_miss() for _ in range(1000))
    worker.set_wants_all_misses(each_miss=False)
    start_s = time.monotonic()
    reported = sum(server.takes_miss() for _ in range(1000))
    assert 1 <= reported <= 2 + (time.monotonic() - start_s) / MISS_INTERVAL_S
    time.sleep(MISS_INTERVAL_S)
    assert server.takes_miss()  # slow misses are all reported
    worker.set_wants_all_misses(each_miss=True)
    assert all(server.takes_miss() for _ in range(1000))


def held_s(steps: int, *, pushed_at: int = 1000) -> float:
    """How long a READ is held, in virtual seconds, while the worker makes progress `steps` times.
    At step `pushed_at` it has pushed the entry."""
    server, worker = both_sides()
    worker.mark_soon(np.array([7], np.uint32))

    async def push() -> None:
        for number in range(steps):
            worker.count_progress()
            if number == pushed_at:
                worker.clear_soon()
            await trio.sleep(HOLD_STEP_S / 2)

    async def measure() -> float:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(push)
            await trio.lowlevel.checkpoint()
            start_s = trio.current_time()
            await server.hold(7)
            return trio.current_time() - start_s

    return trio.run(measure, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_READ_is_held_while_the_worker_makes_progress() -> None:
    """Without progress it is held for some steps. It is never held longer than some
    milliseconds."""
    assert abs(held_s(0) - STILL_STEPS * HOLD_STEP_S) < 1e-9
    assert STILL_STEPS * HOLD_STEP_S < held_s(3) < HOLD_STEPS * HOLD_STEP_S
    assert abs(held_s(200) - HOLD_STEPS * HOLD_STEP_S) < 1e-9


def test_a_READ_is_not_held_after_its_entry_was_pushed() -> None:
    assert held_s(200, pushed_at=3) < (HOLD_STEPS - 1) * HOLD_STEP_S
