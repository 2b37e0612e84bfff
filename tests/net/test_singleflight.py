"""Shared work: which callers share a run, and which items one run takes."""

import threading
from collections.abc import Sequence

import trio
import trio.testing

from diesel_fs.errors import DieselError, UsageError
from diesel_fs.net.singleflight import GroupCommit, ThreadSingleFlight
from tests.rows import each_row


class Gate:
    def __init__(self) -> None:
        self.runs = 0
        self.ended = 0
        self.began = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def run(self, key: str) -> int:
        self.runs += 1
        number = self.runs
        self.began.release()
        assert self.go.acquire(timeout=20)
        self.ended += 1
        if key == "bad":
            raise DieselError(f"run {number}")
        return number

    async def wait_begun(self) -> None:
        assert await trio.to_thread.run_sync(lambda: self.began.acquire(timeout=20))


async def _ask(rounds: ThreadSingleFlight[str, int], key: str, found: list[int | str]) -> None:
    try:
        found.append(await rounds.run(key))
    except DieselError as error:
        found.append(error.message)


@each_row(
    ("key", "outcomes"), [("a", [1, 2, 2, 2, 3]), ("bad", ["run 1"] + ["run 2"] * 3 + ["run 3"])]
)
async def test_a_caller_during_a_run_gets_the_next_run(key: str, outcomes: list[int | str]) -> None:
    """The state that a running run read may be stale by the time of the call."""
    gate, found = Gate(), list[int | str]()
    rounds = ThreadSingleFlight(gate.run, trio.CapacityLimiter(2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_ask, rounds, key, found)
        await gate.wait_begun()
        for _ in range(3):
            nursery.start_soon(_ask, rounds, key, found)
        await trio.testing.wait_all_tasks_blocked()
        gate.go.release()
        await gate.wait_begun()
        gate.go.release()
    gate.go.release()
    with trio.fail_after(20):
        await _ask(rounds, key, found)  # all runs were over: it takes another
    assert found == outcomes
    assert gate.runs == 3


async def test_keys_do_not_wait_for_each_other_and_runs_outlive_their_callers() -> None:
    gate, found = Gate(), list[int | str]()
    rounds = ThreadSingleFlight(gate.run, trio.CapacityLimiter(2))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_ask, rounds, "a", found)
        nursery.start_soon(_ask, rounds, "b", found)
        await gate.wait_begun()
        await gate.wait_begun()
        nursery.cancel_scope.cancel()
    assert gate.ended == 0
    gate.go.release(4)
    with trio.fail_after(20):
        assert {await rounds.run("a"), await rounds.run("b")} == {3, 4}
    assert (found, gate.runs, gate.ended) == ([], 4, 4)


async def test_items_are_grouped_up_to_a_size_and_a_bad_one_fails_alone() -> None:
    sizes, go = list[int](), threading.Event()
    outcomes: dict[int, int | str] = {}

    def run(key: str, items: Sequence[int]) -> int:
        sizes.append(len(items))
        assert go.wait(20)
        if 7 in items:
            raise UsageError("seven")
        return sum(items)

    async def add(item: int) -> None:
        try:
            outcomes[item] = await groups.add("a", item, 10)
        except UsageError as error:
            outcomes[item] = error.message

    groups = GroupCommit(run, trio.CapacityLimiter(1), 40, lambda e: isinstance(e, UsageError))
    async with trio.open_nursery() as nursery:
        for item in (100, *range(1, 9)):
            nursery.start_soon(add, item)
            await trio.testing.wait_all_tasks_blocked()
        go.set()
    assert sizes == [1, 4, 4, 1, 1, 1, 1]
    assert outcomes == {100: 100, **dict.fromkeys(range(1, 5), 10), 5: 5, 6: 6, 7: "seven", 8: 8}
