"""The memory that server and worker share: which files are pushed soon, how long a READ is held."""

import os
import time
from collections.abc import Callable

import numpy as np
import pytest
import trio
import trio.lowlevel
import trio.testing

from diesel_fs.mounts.sessions.push_status import (
    HOLD_STEP_S,
    HOLD_STEPS,
    MISS_INTERVAL_S,
    READ_SLOTS,
    SLOT_BYTES,
    SLOW_HOLD_STEPS,
    SLOW_STILL_STEPS,
    STILL_STEPS,
    HeldBytes,
    HeldRead,
    PushStatusMap,
    push_status_file,
)
from tests.rows import each_row


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


def whole(unique: int = 1, size: int = 100) -> HeldBytes:
    return HeldBytes(unique, 0, size)


def hold(server: PushStatusMap, entry: int, wanted: HeldBytes | None = None) -> HeldRead:
    held = server.try_hold(entry, lambda: wanted)
    assert held is not None
    return held


def is_held(server: PushStatusMap, entry: int) -> bool:
    return server.try_hold(entry, whole) is not None


def test_the_worker_leaves_out_entries_whose_READ_is_held() -> None:
    server, worker = both_sides()
    worker.mark_soon(np.array([4, 5, 6], np.uint32))
    held, other = hold(server, 5), hold(server, 5)
    entries = np.array([4, 5, 6])
    assert worker.mark_now(entries).tolist() == [False, True, False]
    held.end()
    assert worker.mark_now(entries).tolist() == [False, True, False], "another READ still waits"
    other.end()
    assert not worker.mark_now(entries).any()


def test_a_READ_of_an_entry_that_is_being_stored_is_not_held() -> None:
    """Otherwise both would wait: the worker for the page that the READ has locked."""
    server, worker = both_sides()
    assert not is_held(server, 4)  # not marked as soon
    worker.mark_soon(np.array([4, 5], np.uint32))
    worker.mark_now(np.array([4]))
    assert not is_held(server, 4)
    assert is_held(server, 5)
    worker.mark_soon(np.array([5], np.uint32))
    assert not is_held(server, 4)


def test_a_number_that_is_no_entry_is_never_held() -> None:
    server, worker = both_sides(1000)
    worker.mark_soon(np.arange(1000, dtype=np.uint32))
    assert [is_held(server, entry) for entry in (-1, 1000, 1 << 62)] == [False] * 3


def waited(held: HeldRead, meanwhile: Callable[[], None] = lambda: None) -> bytes | None:
    async def wait() -> bytes | None:
        async def act() -> None:
            await trio.sleep(1.5 * HOLD_STEP_S)
            meanwhile()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(act)
            return await held.wait()

    return trio.run(wait, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_held_READ_gets_its_bytes_from_the_worker() -> None:
    """The worker has another part of the file than the READ wants, which is the larger one."""
    server, worker = both_sides()
    worker.mark_soon(np.array([5], np.uint32))
    content = os.urandom(5_000)
    held = hold(server, 5, HeldBytes(77, 1_500, 2_000))
    is_done = []
    handed = waited(held, lambda: is_done.append(worker.hand_over(5, 1_000, memoryview(content))))
    assert handed == content[500:2_500]
    assert is_done == [True]


def test_a_READ_of_a_whole_file_leaves_nothing_to_store() -> None:
    server, worker = both_sides()
    worker.mark_soon(np.array([5, 6], np.uint32))
    content = os.urandom(100)
    first, second = hold(server, 5, whole(1)), hold(server, 6, whole(2))
    assert worker.hand_over(5, 0, memoryview(content))
    assert waited(first) == content
    assert waited(second) is None  # it is not answered by the bytes of another file


@each_row(
    ("reads", "rest"),
    [
        ([(0, 8_192)], [(8_192, 20_000)]),
        ([(4_096, 8_192)], [(0, 4_096), (12_288, 20_000)]),
        ([(16_384, 3_616), (0, 4_096)], [(4_096, 16_384)]),  # up to the file's end
        ([(0, 20_000)], []),
        ([(100, 4_096)], []),  # in the middle of a page
        ([], []),
    ],
    ids=["begin", "middle", "both ends", "whole", "part of a page", "no READ"],
)
def test_the_worker_pushes_what_held_READs_leave(
    reads: list[tuple[int, int]], rest: list[tuple[int, int]]
) -> None:
    server, worker = both_sides()
    worker.mark_soon(np.array([5], np.uint32))
    for unique, read in enumerate(reads, 1):
        hold(server, 5, HeldBytes(unique, *read))
    assert worker.besides_held(5, 0, 20_000) == rest
    assert worker.hand_over(5, 0, memoryview(bytes(20_000))) == bool(reads)


@pytest.mark.parametrize(
    "wanted",
    [None, HeldBytes(9, 50, 100), HeldBytes(9, 0, SLOT_BYTES + 1)],
    ids=["bytes of several files", "bytes that the worker has not", "more than a slot holds"],
)
def test_a_READ_that_cannot_get_its_bytes_is_answered_by_the_server(
    wanted: HeldBytes | None,
) -> None:
    """The worker removes the mark, so the hold ends at once."""
    server, worker = both_sides()
    worker.set_store_is_slow(is_slow=True)
    worker.mark_soon(np.array([5], np.uint32))
    held = hold(server, 5, wanted)

    def store() -> None:
        assert not worker.hand_over(5, 0, memoryview(bytes(100)))
        worker.end_soon(np.array([5]))

    assert waited(held, store) is None


def test_bytes_that_come_after_the_end_of_a_hold_go_to_no_other_READ() -> None:
    server, worker = both_sides()
    worker.mark_soon(np.array([5, 6], np.uint32))
    before = hold(server, 5, whole(1))
    worker.hand_over(5, 0, memoryview(b"a" * 100))
    before.end()
    after = hold(server, 6, whole(2))
    assert after.slot == before.slot
    assert server.handed_over(after.slot, 2) is None
    worker.hand_over(6, 0, memoryview(b"b" * 100))
    assert server.handed_over(after.slot, 2) == b"b" * 100
    worker._slots[after.slot * SLOT_BYTES] ^= 1
    assert server.handed_over(after.slot, 2) is None


@pytest.mark.parametrize("moment", [0, 1], ids=["before they are copied", "before the checksum"])
def test_bytes_that_come_while_a_slot_changes_hands_go_to_no_other_READ(moment: int) -> None:
    """The server ends the hold, and gives the slot to another READ, while the worker fills it."""
    server, worker = both_sides()
    worker.mark_soon(np.array([5, 6], np.uint32))
    before, after = hold(server, 5, whole(1)), list[HeldRead]()

    class Content:
        """Bytes of entry 5, which the worker takes twice: for the slot, and for the checksum."""

        taken = 0

        def __len__(self) -> int:
            return 100

        def __getitem__(self, part: "slice[int, int, None]") -> memoryview:
            if self.taken == moment:
                before.end()
                after.append(hold(server, 6, whole(2)))
            self.taken += 1
            return memoryview(b"a" * 100)[part]

    worker.hand_over(5, 0, Content())  # type: ignore[arg-type]  # it stands in for a memoryview
    assert after[0].slot == before.slot
    assert server.handed_over(after[0].slot, 2) is None
    worker.hand_over(6, 0, memoryview(b"b" * 100))
    assert server.handed_over(after[0].slot, 2) == b"b" * 100


def test_there_are_slots_for_some_READs() -> None:
    server, worker = both_sides()
    worker.mark_soon(np.arange(100, dtype=np.uint32))
    some = [hold(server, entry, whole(entry)) for entry in range(READ_SLOTS + 1)]
    assert [each.slot for each in some] == [*range(READ_SLOTS), -1]
    some[3].end()
    assert hold(server, 50, whole(50)).slot == 3


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


def held_s(steps: int, *, pushed_at: int = 1000, is_slow: bool = False) -> float:
    """How long a READ is held, in virtual seconds, while the worker makes progress `steps` times.
    At step `pushed_at` it has pushed the entry."""
    server, worker = both_sides()
    worker.mark_soon(np.array([7], np.uint32))
    worker.set_store_is_slow(is_slow=is_slow)

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
            await hold(server, 7, whole()).wait()
            return trio.current_time() - start_s

    return trio.run(measure, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_READ_is_held_while_the_worker_makes_progress() -> None:
    assert abs(held_s(0) - STILL_STEPS * HOLD_STEP_S) < 1e-9
    assert STILL_STEPS * HOLD_STEP_S < held_s(3) < HOLD_STEPS * HOLD_STEP_S
    assert abs(held_s(200) - HOLD_STEPS * HOLD_STEP_S) < 1e-9


def test_a_READ_is_not_held_after_its_entry_was_pushed() -> None:
    assert held_s(200, pushed_at=3) < (HOLD_STEPS - 1) * HOLD_STEP_S


def test_a_READ_is_held_until_its_contents_arrive_from_a_slow_store() -> None:
    assert held_s(10, pushed_at=8, is_slow=True) < 10 * HOLD_STEP_S
    always = 3 * SLOW_HOLD_STEPS
    assert (
        abs(held_s(always, pushed_at=always, is_slow=True) - SLOW_HOLD_STEPS * HOLD_STEP_S) < 1e-9
    )


def test_a_worker_without_progress_delays_one_READ_only() -> None:
    """It is stopped, or hangs."""
    assert abs(held_s(0, is_slow=True) - SLOW_STILL_STEPS * HOLD_STEP_S) < 1e-9
    server, worker = both_sides()
    worker.mark_soon(np.array([7], np.uint32))
    server.stuck_at = server.progress
    assert server.try_hold(7, whole) is None
    worker.count_progress()
    assert server.try_hold(7, whole) is not None
