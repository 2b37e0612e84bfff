"""The board that server and helper share: what is pushed soon, and how long a READ waits for it."""

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


def boards(entry_count: int = 1000) -> tuple[PushStatusMap, PushStatusMap]:
    """The server's and the helper's view of one board."""
    descriptor = push_status_file(entry_count)
    server = PushStatusMap(descriptor)
    helper = PushStatusMap(descriptor)
    os.close(descriptor)
    return server, helper


def soon(board: PushStatusMap) -> list[int]:
    return [entry for entry in range(1000) if board.is_soon(entry)]


def test_what_is_announced_is_soon_until_something_else_is() -> None:
    server, helper = boards()
    assert soon(server) == []
    helper.mark_soon(np.array([3, 999, 0], np.uint32))
    assert soon(server) == [0, 3, 999]
    helper.mark_soon(np.array([3, 4], np.uint32))
    assert soon(server) == [3, 4]
    helper.mark_soon(np.empty(0, np.uint32))
    assert soon(server) == []


def test_what_is_being_read_is_left_out_while_it_is() -> None:
    server, helper = boards()
    helper.mark_soon(np.array([4, 5, 6], np.uint32))
    assert server.try_hold(5)
    entries = np.array([4, 5, 6])
    assert helper.mark_now(entries).tolist() == [False, True, False]
    server.end_hold(5)
    assert not helper.mark_now(entries).any()


def test_a_READ_of_what_is_being_stored_is_answered_at_once() -> None:
    """The helper waits for the page that the READ has locked."""
    server, helper = boards()
    assert not server.try_hold(4)  # it is not soon
    helper.mark_soon(np.array([4, 5], np.uint32))
    helper.mark_now(np.array([4]))
    assert not server.try_hold(4)
    assert server.try_hold(5)
    helper.mark_soon(np.array([5], np.uint32))
    assert not server.try_hold(4)


def test_what_is_no_entry_is_never_held() -> None:
    server, helper = boards(1000)
    helper.mark_soon(np.arange(1000, dtype=np.uint32))
    assert [server.try_hold(entry) for entry in (-1, 1000, 1 << 62)] == [False] * 3


def test_of_many_misses_few_are_told_where_few_are_wanted() -> None:
    server, helper = boards()
    assert all(server.takes_miss() for _ in range(1000))
    helper.set_wants_all_misses(each_miss=False)
    start_s = time.monotonic()
    told = sum(server.takes_miss() for _ in range(1000))
    assert 1 <= told <= 2 + (time.monotonic() - start_s) / MISS_INTERVAL_S
    time.sleep(MISS_INTERVAL_S)
    assert server.takes_miss()  # misses that come slowly are all told
    helper.set_wants_all_misses(each_miss=True)
    assert all(server.takes_miss() for _ in range(1000))


def held_s(signs: int, *, rest: int = 1000) -> float:
    """How long a READ is held while the helper goes on for so many half steps, in virtual seconds;
    after `rest` of them it has pushed the entry.
    """
    server, helper = boards()
    helper.mark_soon(np.array([7], np.uint32))

    async def go_on() -> None:
        for number in range(signs):
            helper.count_progress()
            if number == rest:
                helper.clear_soon()
            await trio.sleep(HOLD_STEP_S / 2)

    async def measure() -> float:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on)
            await trio.lowlevel.checkpoint()
            start_s = trio.current_time()
            await server.hold(7)
            return trio.current_time() - start_s

    return trio.run(measure, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_READ_waits_while_the_helper_goes_on() -> None:
    """And some steps where it stands still; never longer than some milliseconds."""
    assert abs(held_s(0) - STILL_STEPS * HOLD_STEP_S) < 1e-9
    assert STILL_STEPS * HOLD_STEP_S < held_s(3) < HOLD_STEPS * HOLD_STEP_S
    assert abs(held_s(200) - HOLD_STEPS * HOLD_STEP_S) < 1e-9


def test_a_READ_waits_no_longer_for_what_is_there() -> None:
    assert held_s(200, rest=3) < (HOLD_STEPS - 1) * HOLD_STEP_S
